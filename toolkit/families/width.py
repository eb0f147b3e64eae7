"""`width`: the leading channels of every layer (HeteroFL, FjORD's ordered dropout).

The smaller networks are nested: what a narrow device trains is a part of what a wider one does,
and every number is averaged over those that have it.
"""

from fractions import Fraction

from msgspec.structs import replace
from torch import Tensor, nn

from exporters.programs.capture import capture
from profiles.errors import SpecError
from toolkit.channels.narrowing import Narrowed, narrow
from toolkit.channels.operator_call import Layer
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.one_step_submodel import whole_network
from toolkit.submodels.spec import Spec
from toolkit.submodels.submodel import LayerDecision, Stateless, Submodel
from toolkit.submodels.tensor_entries import dense_entries, statistics_role
from toolkit.submodels.tensor_slices import held
from toolkit.submodels.training_config import TrainingConfig


class Width(Stateless):
    """See the module. The model's input channels and its classes stay."""

    name = "width"
    usage = "width:RATIO"
    summary = "the leading channels of every layer (HeteroFL)"

    def split(
        self,
        model: nn.Module,
        sample_shape: tuple[int, ...],
        spec: Spec,
        training: TrainingConfig,
    ) -> Submodel:
        """See Family."""
        spec.check_no_inner()
        spec.check_options()
        ratio = spec.number("channel ratio", 0, 1, "width:0.5")
        captured = capture(model, sample_shape)
        try:
            # A decimal's own value: 0.07 * 100 in binary is above 7.
            narrowed = narrow(captured, Fraction(str(ratio)))
        except SpecError as error:
            raise SpecError(f"{str(spec)!r}: {error}") from None
        small, parts = narrowed.captured, narrowed.parts
        entries = tuple(
            replace(entry, part=parts.get(entry.name))
            for entry in (
                *dense_entries(small, small.parameters, "parameter"),
                *dense_entries(small, small.buffers, statistics_role(training)),
                *dense_entries(small, small.frozen, "frozen"),
            )
        )

        def cut(weights: GlobalModel) -> dict[str, Tensor]:
            return {
                entry.name: weights.tensors[entry.name]
                if entry.part is None
                else held(weights.tensors[entry.name], entry.part)
                for entry in entries
            }

        return whole_network(spec, small, entries, training, cut, treatments=treatments(narrowed))

    def strength(self, spec: Spec) -> float:
        """The width ratio."""
        return spec.number("width ratio", 0, 1, "width:0.5")


def treatments(narrowed: Narrowed) -> list[LayerDecision]:
    """How many channels every weighted layer has left."""
    kept = narrowed.kept

    def left(layer: Layer) -> str:
        out = f"{kept.count(layer.outputs)} of {len(layer.outputs)}"
        if layer.inputs is None:
            return f"{out} channels out"
        return f"{kept.count(layer.inputs)} of {len(layer.inputs)} channels in, {out} out"

    return [LayerDecision(name, left(layer)) for name, layer in narrowed.layers.items()]


FAMILY = Width()
