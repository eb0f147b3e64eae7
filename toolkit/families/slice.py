"""`slice`: EmbracingFL's output-side layers, trained on recorded activations.

The device runs the input side once in inference mode, stage by stage, and writes the output of each
stage to disk (Algorithm 1). It then trains the rest on the last recording (Algorithm 2).

`slice:lstm,skip=128` also records the first 128 steps of the LSTM called `lstm`. A stage then uses
the LSTM's weights, which are trained later. All stages run before training starts, so they use the
weights that the device received.

`recording=float16` stores activations in half the space. `frozen=int8` rounds the weights of the
stages to 8-bit integers with a scale for each output channel.

A second family may exchange the layers of the slice: `slice:0.42+low-rank:0.25`.
"""

import math

from torch import Tensor

from exporters.int8_scales import rounded
from profiles.errors import SpecError
from profiles.text_formatting import counted
from toolkit.cutting.cut_points import Cutter
from toolkit.families import family_named, forms
from toolkit.slicing.cut_model import cut_as_asked
from toolkit.slicing.inner_family import InnerFamily
from toolkit.slicing.slice_program import slice_program, slice_tensors
from toolkit.submodels.family import ExchangesLayers, Family
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.one_step_submodel import counts_of
from toolkit.submodels.rewritten_model import Rewritten
from toolkit.submodels.spec import Spec
from toolkit.submodels.submodel import LayerDecision, SplitRequest, Submodel


class Slice(Family):
    """The family `slice`; see the module."""

    form = forms.SLICE

    def split(self, request: SplitRequest) -> Submodel:
        """See Family."""
        spec, training = request.spec, request.training
        skip = forms.SLICE.whole_number(spec, "skip", 0)
        captured = request.capture()
        half = forms.SLICE.choice(spec, "recording") == "float16"
        cutter = Cutter(captured, "float16" if half else "float32")
        if spec.inner is None:
            # Without a second family no layer is exchanged.
            rewritten = Rewritten(request.model)
            cut = cut_as_asked(cutter, spec, training.batch_size, skip)
        else:
            inner = InnerFamily(request, cutter, exchanging_family(spec))
            rewritten, captured, cut = inner.cut()
        as_int8 = forms.SLICE.choice(spec, "frozen") == "int8"
        tensors = slice_tensors(cut, captured, rewritten, training, as_int8=as_int8)

        def cut_weights(weights: GlobalModel) -> dict[str, Tensor]:
            values = rewritten.tensor_values(weights, tensors.received)
            return values | {name: rounded(values[name]) for name in tensors.int8}

        return Submodel(
            spec=spec,
            program=slice_program(spec, captured, cut, tensors, rewritten, training),
            counts=counts_of(
                tensors.parameters,
                (*tensors.parameters, *tensors.buffers),
                cut.trained,
                training.batch_size,
            ),
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

    def most_strength(self, spec: Spec) -> float:
        """An upper bound below 1, because a slice never trains the tensors before its cut."""
        return 1.0 if "skip" in spec.options else math.nextafter(1.0, 0.0)


def exchanging_family(spec: Spec) -> ExchangesLayers:
    """The second family of `spec`. Raises SpecError if the slice cannot have a second family."""
    if "skip" in spec.options:
        raise SpecError(
            "Invalid combination {spec!r}: a slice with skip= takes no second family.",
            code="spec.invalid-combination",
            spec=str(spec),
        )
    assert spec.inner is not None
    family = family_named(spec.inner.family)
    assert isinstance(family, ExchangesLayers), f"{spec.inner.family} has no `rewrite`"
    return family


FAMILY = Slice()
