"""`width`: the leading channels of every layer (HeteroFL, FjORD's ordered dropout).

The smaller networks are nested: a narrow submodel has a subset of the channels of a wider submodel.
Each number is averaged over the devices that have it.

`scaler=on` divides the outputs of narrowed layers by the ratio while a device trains. HeteroFL's
authors use this with static batch norms. Batch norms that track statistics would not fit: devices
would track scaled outputs, but the outputs of a prediction are not scaled.

`window=rolling` takes other channels in every round (FedRolex). In round t the window begins at
channel t - 1. After the last channel, it continues at the first channel. So every device trains
every channel in turn, with the same graphs.
"""

import dataclasses
from fractions import Fraction
from functools import partial

from msgspec.structs import replace

from toolkit.channels.narrowing import Narrowed, narrow
from toolkit.channels.operator_call import Layer
from toolkit.families import forms
from toolkit.submodels.family import Family
from toolkit.submodels.one_step_submodel import one_step_submodel
from toolkit.submodels.rolling_window import cut_parts
from toolkit.submodels.spec import Spec
from toolkit.submodels.submodel import (
    LayerDecision,
    SplitRequest,
    Submodel,
    dense_tensor_entries,
    statistics_role,
)


class Width(Family):
    """The family `width`. It keeps all input channels and all classes of the model."""

    form = forms.WIDTH

    def split(self, request: SplitRequest) -> Submodel:
        """See Family."""
        spec, ratio = request.spec, self.strength(request.spec)
        # Use the decimal's exact value: with binary numbers, 0.07 * 100 is above 7.
        scaler = forms.WIDTH.choice(spec, "scaler") == "on"
        narrowed = narrow(request.capture(), Fraction(str(ratio)), str(spec), scaler)
        small, ranges = narrowed.captured, narrowed.window(0)
        # Only tensors that became smaller have ranges; the others stand for whole global tensors.
        entries = tuple(
            replace(entry, part=ranges.get(entry.name))
            for entry in (
                *dense_tensor_entries(small, small.parameters, "parameter"),
                *dense_tensor_entries(
                    small, small.buffers, statistics_role(request.training, small)
                ),
                *dense_tensor_entries(small, small.frozen, "frozen"),
            )
        )
        submodel = one_step_submodel(
            request,
            small,
            entries,
            partial(cut_parts, entries),
            layer_decisions=layer_decisions(narrowed),
        )
        if forms.WIDTH.choice(spec, "window") == "leading":
            return submodel
        return dataclasses.replace(submodel, windows=lambda round_: narrowed.window(round_ - 1))

    def strength(self, spec: Spec) -> float:
        """The channel ratio."""
        return forms.WIDTH.size_as_number(spec)


def layer_decisions(narrowed: Narrowed) -> list[LayerDecision]:
    """The number of channels that each weighted layer keeps."""
    kept = narrowed.kept

    def left(layer: Layer) -> str:
        out = f"{kept.count(layer.outputs)} of {len(layer.outputs)}"
        if layer.inputs is None:
            return f"{out} channels out"
        return f"{kept.count(layer.inputs)} of {len(layer.inputs)} channels in, {out} out"

    return [
        LayerDecision(name, left(layer), narrowed.reasons.get(name, ""))
        for name, layer in narrowed.layers.items()
    ]


FAMILY = Width()
