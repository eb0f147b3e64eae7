"""`width`: the leading channels of every layer (HeteroFL, FjORD's ordered dropout).

The smaller networks are nested: a narrow device trains a subset of what a wider device trains. Each
number is averaged over the devices that have it.

`scaler=on` divides the outputs of narrowed layers by the ratio while a device trains, as HeteroFL's
authors do with static batch norms. With statistics that devices track, these would be of scaled
outputs, and predictions, which are not scaled, would not fit them.

`window=rolling` takes other channels in every round: in round t those from t - 1 on, around the end
(FedRolex). Every device then trains every channel in turn, with the same graphs.
"""

import dataclasses
from fractions import Fraction
from functools import partial

from msgspec.structs import replace
from torch import nn

from exporters.recording.capture import capture
from toolkit.channels.narrowing import Narrowed, narrow
from toolkit.channels.operator_call import Layer
from toolkit.submodels.family import Stateless
from toolkit.submodels.hyperparameters import TrainingConfig
from toolkit.submodels.one_step_submodel import one_step_submodel
from toolkit.submodels.round_window import cut_parts
from toolkit.submodels.spec import Spec
from toolkit.submodels.spec_form import Choice, Number, SpecForm
from toolkit.submodels.submodel import LayerDecision, Submodel
from toolkit.submodels.tensor_entries import dense_tensor_entries, statistics_role

FORM = SpecForm(
    family="width",
    usage="width:RATIO",
    summary="the leading channels of every layer (HeteroFL), or a rolling window; scaler=, window=",
    size=Number("channel ratio", "width:0.5", 1),
    options=(Choice("scaler", ("off", "on")), Choice("window", ("leading", "rolling"))),
)


class Width(Stateless):
    """See the module. The model's input channels and its classes stay."""

    form = FORM

    def split(
        self,
        model: nn.Module,
        sample_shape: tuple[int, ...],
        spec: Spec,
        training: TrainingConfig,
    ) -> Submodel:
        """See Family."""
        ratio = self.strength(spec)
        captured = capture(model, sample_shape)
        # The decimal's exact value: in binary, 0.07 * 100 is above 7.
        scaler = FORM.choice(spec, "scaler") == "on"
        narrowed = narrow(captured, Fraction(str(ratio)), str(spec), scaler)
        small, ranges = narrowed.captured, narrowed.window(0)
        # Only tensors that became smaller have ranges; the others stand for whole global tensors.
        entries = tuple(
            replace(entry, part=ranges.get(entry.name))
            for entry in (
                *dense_tensor_entries(small, small.parameters, "parameter"),
                *dense_tensor_entries(small, small.buffers, statistics_role(training)),
                *dense_tensor_entries(small, small.frozen, "frozen"),
            )
        )
        submodel = one_step_submodel(
            spec,
            small,
            entries,
            training,
            partial(cut_parts, entries),
            layer_decisions=layer_decisions(narrowed),
        )
        if FORM.choice(spec, "window") == "leading":
            return submodel
        return dataclasses.replace(submodel, windows=lambda round_: narrowed.window(round_ - 1))

    def strength(self, spec: Spec) -> float:
        """The channel ratio."""
        return FORM.size_as_number(spec)


def layer_decisions(narrowed: Narrowed) -> list[LayerDecision]:
    """How many channels each weighted layer keeps."""
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
