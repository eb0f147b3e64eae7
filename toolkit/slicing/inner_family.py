"""A second family after the cut. It replaces the trained layers of a slice with smaller layers."""

from dataclasses import dataclass, replace

from exporters.objectives.loss_text import is_own
from exporters.recording.capture import capture, record
from exporters.recording.captured import Captured
from profiles.errors import SpecError
from toolkit.cutting.cut_points import CutPoint, Cutter, tensors_read
from toolkit.cutting.sample_flow import SampleFlow
from toolkit.cutting.slice_loads import loads_after
from toolkit.slicing.cut_choice import choose_cut
from toolkit.slicing.cut_model import CutModel, cut_at
from toolkit.submodels.family import ExchangesLayers
from toolkit.submodels.rewritten_model import Rewritten, reasons, refuse_if_unusable
from toolkit.submodels.spec import Spec
from toolkit.submodels.submodel import SplitRequest
from toolkit.submodels.weighted_layers import weighted_layers


@dataclass(frozen=True)
class InnerFamily:
    """Applies the second family of a spec to a model.

    Attributes:
        request: The model, and the whole spec.
        cutter: Cuts the model.
        family: The second family.
    """

    request: SplitRequest
    cutter: Cutter
    family: ExchangesLayers

    @property
    def inner(self) -> Spec:
        """The second family's own spec."""
        assert self.request.spec.inner is not None
        return self.request.spec.inner

    def cut(self) -> tuple[Rewritten, Captured, CutModel]:
        """Exchange the layers after the cut; return the new model, its graphs and the cut model.

        Raises SpecError if the second family can exchange no layer of the slice.
        """
        spec, batch = self.request.spec, self.request.training.batch_size
        point = choose_cut(self.cutter, spec, batch, self.load)
        rewritten = self.rewritten_after(point)
        # At strength 1 the second family may leave every layer unchanged.
        if not rewritten.origins and self.family.strength(self.inner) != 1:
            why = reasons(rewritten.layer_decisions)
            raise SpecError(
                "{spec!r}: no layer of the slice, which begins at {module}, gets smaller{reason}.",
                code="spec.nothing-smaller",
                spec=str(spec),
                module=point.module,
                reason=f"; {why}" if why else "",
            )
        with refuse_if_unusable(spec, rewritten.layer_decisions):
            own = is_own(self.request.training.loss)
            captured = capture(rewritten.model, self.cutter.captured.sample_shape, own)
        cutter = Cutter(captured, self.cutter.recording)
        # Layers are exchanged only after the cut, so positions up to the cut stay the same.
        same_point = next(p for p in cutter.points if p.position == point.position)
        cut = cut_at(cutter, same_point, batch)
        # Modules of an exchanged layer may have new names, but the user knows only the original
        # name.
        return rewritten, captured, replace(cut, recorded=f"ahead of {point.module}")

    def rewritten_after(self, point: CutPoint) -> Rewritten:
        """Exchange the layers of the model after `point`."""
        captured = self.cutter.captured
        read = set(tensors_read([self.cutter.trained(point.position)]))
        trained = read - self.cutter.fixed_after(point.position)
        exchangeable = {
            layer.name
            for layer in weighted_layers(self.request.model, captured)
            if any(layer.path(weight) in trained for weight in layer.weights())
        }
        return self.family.rewrite(self.request.model, captured, self.inner, exchangeable)

    def load(self, point: CutPoint) -> int:
        """Trained parameters plus activations of the slice after `point`, with exchanged layers."""
        rewritten, captured = self.rewritten_after(point), self.cutter.captured
        with refuse_if_unusable(self.request.spec, rewritten.layer_decisions):
            graph = record(
                rewritten.model, captured.sample_shape, captured.sample_dtype, training=True
            )
        trained = {n: v for n, v in rewritten.model.named_parameters() if v.requires_grad}
        return loads_after(SampleFlow(graph), trained, self.request.training.batch_size)[
            point.position
        ]
