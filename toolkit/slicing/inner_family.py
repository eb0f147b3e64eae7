"""A second family after the cut: it exchanges the layers that the slice trains."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from torch import nn

from exporters.recording.capture import capture, record
from exporters.recording.captured import Captured
from profiles.errors import SpecError
from toolkit.cutting.cut_points import CutPoint, Cutter, tensors_read
from toolkit.cutting.sample_flow import SampleFlow
from toolkit.cutting.slice_loads import loads_after
from toolkit.slicing.cut_choice import choose_cut
from toolkit.slicing.cut_model import CutModel, cut_at
from toolkit.submodels.rewritten_model import Rewritten, reasons, refuse_if_unusable
from toolkit.submodels.spec import Spec
from toolkit.submodels.weighted_layers import weighted_layers

Rewrite = Callable[[Captured, Collection[str]], Rewritten]
"""Replaces the layers with the given names, in a copy of the recorded model."""


@dataclass(frozen=True)
class InnerFamily:
    """The second family of `spec`, at work on `model`.

    Attributes:
        spec: The whole spec, for messages.
        model: The global model.
        cutter: Cuts `model`.
        batch: Samples in a batch.
        rewrite: What the second family does with the layers of a slice.
        may_keep_all: Whether the second family's size lets it leave every layer unchanged.
    """

    spec: Spec
    model: nn.Module
    cutter: Cutter
    batch: int
    rewrite: Rewrite
    may_keep_all: bool

    def cut(self) -> tuple[Rewritten, Captured, CutModel]:
        """The model with exchanged layers after the cut, its recording, and both sides of it.

        Raises SpecError if the second family can exchange no layer of the slice.
        """
        point = choose_cut(self.cutter, self.spec, self.batch, self.load)
        rewritten = self.rewritten_after(point)
        if not rewritten.origins and not self.may_keep_all:
            why = reasons(rewritten.layer_decisions)
            raise SpecError(
                "{spec!r}: no layer of the slice, which begins at {module}, gets smaller{reason}.",
                code="spec.nothing-smaller",
                spec=str(self.spec),
                module=point.module,
                reason=f"; {why}" if why else "",
            )
        with refuse_if_unusable(self.spec, rewritten.layer_decisions):
            captured = capture(rewritten.model, self.cutter.captured.sample_shape)
        cutter = Cutter(captured, self.cutter.recording)
        # Layers are exchanged after the cut only, so that the place counts the same operators.
        same_point = next(p for p in cutter.points if p.place == point.place)
        cut = cut_at(cutter, same_point, self.batch)
        # An exchanged layer may be called otherwise inside; the user knows the original name.
        return rewritten, captured, replace(cut, recorded=f"ahead of {point.module}")

    def rewritten_after(self, point: CutPoint) -> Rewritten:
        """The model with the layers after `point` exchanged."""
        captured = self.cutter.captured
        read = set(tensors_read([self.cutter.trained(point.place)]))
        trained = read - self.cutter.fixed_after(point.place)
        exchangeable = {
            layer.name
            for layer in weighted_layers(self.model, captured)
            if any(layer.path(weight) in trained for weight in layer.weights())
        }
        return self.rewrite(captured, exchangeable)

    def load(self, point: CutPoint) -> int:
        """Trained parameters plus activations of the slice after `point`, layers exchanged."""
        rewritten, captured = self.rewritten_after(point), self.cutter.captured
        with refuse_if_unusable(self.spec, rewritten.layer_decisions):
            graph = record(
                rewritten.model, captured.sample_shape, captured.sample_dtype, training=True
            )
        trained = {n: v for n, v in rewritten.model.named_parameters() if v.requires_grad}
        return loads_after(SampleFlow(graph), trained, self.batch)[point.place]
