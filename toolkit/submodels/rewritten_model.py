"""A model with other layers in place of some of its own, and what each of its tensors stands for.

A family that only exchanges layers makes one of these; it can then be trained whole or sliced.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from msgspec.structs import replace
from torch import Tensor, nn

from device_agent.formats.manifest import Role, TensorEntry
from exporters.programs.captured import Captured
from exporters.programs.training_signatures import Penalty
from profiles.errors import ModelError, SpecError
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.spec import Spec
from toolkit.submodels.submodel import LayerDecision
from toolkit.submodels.tensor_entries import dense_entries


@dataclass(frozen=True)
class Origin:
    """The global tensor that a tensor stands for, and which of its factors it is, if any."""

    name: str
    factor: str | None = None


@dataclass(frozen=True)
class Rewritten:
    """`origins` has the tensors of exchanged layers; all others are the global model's own.

    `factors` computes the numbers of all tensors in `origins`. `penalty` is what the objective
    gains, `undecayed` the tensors that weight decay leaves alone.
    """

    model: nn.Module
    origins: Mapping[str, Origin] = field(default_factory=dict)
    factors: Callable[[GlobalModel], dict[str, Tensor]] = lambda _: {}
    penalty: Penalty | None = None
    undecayed: frozenset[str] = frozenset()
    treatments: tuple[LayerDecision, ...] = ()

    def entries(
        self, captured: Captured, names: Iterable[str], role: Role
    ) -> tuple[TensorEntry, ...]:
        """One entry for each of `names`, tensors of the rewritten model, in `role`."""
        return tuple(
            replace(entry, stands_for=origin.name, factor=origin.factor)
            if (origin := self.origins.get(entry.name))
            else entry
            for entry in dense_entries(captured, names, role)
        )

    def values(self, weights: GlobalModel, entries: Iterable[TensorEntry]) -> dict[str, Tensor]:
        """The numbers of `entries`, from the global model."""
        factors = self.factors(weights)
        return {
            e.name: factors[e.name] if e.name in factors else weights.tensors[str(e.stands_for)]
            for e in entries
        }


@contextmanager
def with_factors(spec: Spec, treatments: Iterable[LayerDecision]) -> Iterator[None]:
    """Raise SpecError where a model, recorded with factors as `treatments` say, raises ModelError.

    The model has been recorded with its own layers before: it asks one of them for what only these
    have.
    """
    try:
        yield
    except ModelError as error:
        layers = ", ".join(t.layer for t in treatments if t.form != "dense")
        raise SpecError(
            f"{str(spec)!r}: the model does not run with factors in place of {layers}. {error}"
        ) from error
