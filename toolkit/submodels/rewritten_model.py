"""A model in which some layers are replaced.

`Rewritten` also says which global tensor each tensor of a new layer replaces.

A family that only exchanges layers returns such a model. The model can be trained whole or sliced.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from msgspec.structs import replace
from torch import Tensor, nn

from device_agent.formats.manifest import Role, TensorEntry
from exporters.programs.training.training_signatures import Penalty
from exporters.recording.captured import Captured
from profiles.errors import ModelError, SpecError
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.spec import Spec
from toolkit.submodels.submodel import LayerDecision, dense_tensor_entries


@dataclass(frozen=True)
class Origin:
    """Says that a tensor of a new layer replaces the global tensor `name`.

    If the new tensor is one of several factors, `factor` is the label of this factor, else None.
    """

    name: str
    factor: str | None = None


@dataclass(frozen=True)
class Rewritten:
    """A model in which some layers are replaced.

    Attributes:
        model: The model with the new layers.
        origins: Maps the name of each tensor of the new layers to the global tensor that it
            replaces. All other tensors are unchanged tensors of the global model.
        factors: Computes the values of all tensors in `origins` from a global model.
        penalty: A term to add to the loss, or None.
        undecayed: Names of the tensors without weight decay.
        layer_decisions: The form of each layer.
    """

    model: nn.Module
    origins: Mapping[str, Origin] = field(default_factory=dict)
    factors: Callable[[GlobalModel], dict[str, Tensor]] = lambda _: {}
    penalty: Penalty | None = None
    undecayed: frozenset[str] = frozenset()
    layer_decisions: tuple[LayerDecision, ...] = ()

    def tensor_entries(
        self, captured: Captured, names: Iterable[str], role: Role
    ) -> tuple[TensorEntry, ...]:
        """Make an entry with `role` for each tensor of the rewritten model in `names`."""
        return tuple(
            replace(entry, stands_for=origin.name, factor=origin.factor)
            if (origin := self.origins.get(entry.name))
            else entry
            for entry in dense_tensor_entries(captured, names, role)
        )

    def tensor_values(
        self, weights: GlobalModel, entries: Iterable[TensorEntry]
    ) -> dict[str, Tensor]:
        """The value of each tensor in `entries`, from the global model `weights`."""
        # Compute all factors at once: one decomposition gives all factors of a weight.
        factors = self.factors(weights)
        return {
            e.name: factors[e.name] if e.name in factors else weights.tensors[str(e.stands_for)]
            for e in entries
        }


def reasons(layer_decisions: Iterable[LayerDecision]) -> str:
    """The reasons why layers stay dense, as text."""
    return "; ".join(f"{d.layer}: {d.reason}" for d in layer_decisions if d.reason)


@contextmanager
def refuse_if_unusable(spec: Spec, layer_decisions: Iterable[LayerDecision]) -> Iterator[None]:
    """Turn a ModelError in the block into a SpecError. The block records a model with new layers.

    The model was recorded without errors before its layers were replaced. So an error means that
    the model's code uses an attribute of a replaced layer that the new layer lacks.
    """
    try:
        yield
    except ModelError as error:
        replaced = [d.layer for d in layer_decisions if d.form != "dense"]
        raise SpecError(
            "{spec!r}: the model does not run with other modules in place of {layers}. {reason}",
            code="spec.layers-not-replaceable",
            spec=str(spec),
            layers=replaced,
            reason=str(error),
        ) from error
