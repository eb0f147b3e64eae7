"""`slice`: EmbracingFL's output-side layers, trained on recorded activations.

The device runs the input side once in inference mode, stage by stage, and writes the output of each
stage to disk (Algorithm 1). It then trains the rest on the last recording (Algorithm 2).

`slice:lstm,skip=128` also records the first 128 steps of the LSTM called `lstm`. A stage then reads
the same weights that are trained after it. All stages run before training starts, so that they use
the weights that the device received.

`recording=float16` stores activations in half the space. `frozen=int8` rounds the weights of the
stages to 8-bit integers with a scale for each output channel.

A second family may exchange the layers of the slice: `slice:0.42+low-rank:0.25`.
"""

from torch import Tensor, nn

from exporters.int8_weights import rounded
from exporters.recording.capture import capture
from profiles.errors import SpecError
from profiles.text_formatting import counted
from toolkit.cutting.cut_points import Cutter
from toolkit.families import family_named
from toolkit.slicing.cut_model import cut_as_asked
from toolkit.slicing.inner_family import InnerFamily
from toolkit.slicing.slice_program import count_slice, slice_program, slice_tensors
from toolkit.submodels.family import ExchangesLayers, Stateless
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.hyperparameters import TrainingConfig
from toolkit.submodels.rewritten_model import Rewritten
from toolkit.submodels.spec import Spec
from toolkit.submodels.spec_form import Choice, Option, SpecForm, Text
from toolkit.submodels.submodel import LayerDecision, Submodel

FORM = SpecForm(
    family="slice",
    usage="slice:CAPACITY or slice:MODULE",
    summary=(
        "the output-side layers, trained on recorded activations (EmbracingFL); skip=, "
        "recording=float16, frozen=int8; slice:...+low-rank:... factorizes them too"
    ),
    size=Text(
        "first module to train or the largest capacity allowed", "slice:blocks.3 or slice:0.42"
    ),
    options=(
        Option("skip", whole=True),
        Choice("recording", ("float32", "float16")),
        Choice("frozen", ("float32", "int8")),
    ),
    selects_layers=True,
)


class Slice(Stateless):
    """See the module."""

    form = FORM

    def split(
        self,
        model: nn.Module,
        sample_shape: tuple[int, ...],
        spec: Spec,
        training: TrainingConfig,
    ) -> Submodel:
        """See Family."""
        skip = FORM.whole_number(spec, "skip", 0)
        captured = capture(model, sample_shape)
        half = FORM.choice(spec, "recording") == "float16"
        cutter = Cutter(captured, "float16" if half else "float32")
        if spec.inner is None:
            # Without a second family no layer is exchanged.
            rewritten = Rewritten(model)
            cut = cut_as_asked(cutter, spec, training.batch_size, skip)
        else:
            inner = inner_family(model, cutter, spec, training.batch_size)
            rewritten, captured, cut = inner.cut()
        as_int8 = FORM.choice(spec, "frozen") == "int8"
        tensors = slice_tensors(cut, captured, rewritten, training, as_int8=as_int8)

        def cut_weights(weights: GlobalModel) -> dict[str, Tensor]:
            values = rewritten.tensor_values(weights, tensors.received)
            return values | {name: rounded(values[name]) for name in tensors.int8}

        return Submodel(
            spec=spec,
            program=slice_program(spec, captured, cut, tensors, rewritten, training),
            counts=count_slice(cut, captured, tensors, training),
            layer_decisions=(
                LayerDecision(
                    cut.recorded,
                    "frozen",
                    f"{counted(len(cut.stages), 'stage')} of the multi-step forward pass",
                ),
                *rewritten.layer_decisions,
            ),
            cut=cut_weights,
        )


def inner_family(model: nn.Module, cutter: Cutter, spec: Spec, batch: int) -> InnerFamily:
    """The second family of `spec`. Raises SpecError if it cannot be combined with this slice."""
    inner = spec.inner
    assert inner is not None
    if "skip" in spec.options:
        raise SpecError(
            "Invalid combination {spec!r}: a slice with skip= takes no second family.",
            code="spec.invalid-combination",
            spec=str(spec),
        )
    family = family_named(inner.family)
    assert isinstance(family, ExchangesLayers), f"{inner.family} has no `rewrite`"
    return InnerFamily(
        spec=spec,
        model=model,
        cutter=cutter,
        batch=batch,
        rewrite=lambda captured, among: family.rewrite(model, captured, inner, among),
        may_keep_all=family.strength(inner) == 1,
    )


FAMILY = Slice()
