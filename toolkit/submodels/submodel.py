"""What a family makes of a model: a submodel, and what a family must be able to do."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from device_agent.formats.manifest import TensorEntry
from exporters.programs.program import Program
from profiles.errors import UpdateError
from toolkit.submodels.capacity import Counts
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.matrix_product import Product
from toolkit.submodels.spec import Spec
from toolkit.submodels.training_config import TrainingConfig

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each global tensor, by name."""


def shapes_of(tensors: Mapping[str, Tensor]) -> Shapes:
    """The shapes of global `tensors`."""
    return {name: tuple(value.shape) for name, value in tensors.items()}


@dataclass(frozen=True)
class LayerDecision:
    """What a submodel does with one weighted layer, and why where that is no obvious choice."""

    layer: str
    form: str
    reason: str = ""


@dataclass(frozen=True)
class Submodel:
    """One family at one size, on one model: a program for the exporters and its weights.

    `cut` computes the tensors that the device receives from the global model of a round; the
    program itself does not change from round to round.
    """

    spec: Spec
    program: Program
    counts: Counts
    treatments: tuple[LayerDecision, ...]
    cut: Callable[[GlobalModel], dict[str, Tensor]]

    @property
    def bytes(self) -> int:
        """Size of the tensors that the device receives, in bytes (float32)."""
        stored = (entry for entry in self.program.tensors if entry.stored)
        return sum(4 * count(entry.shape) for entry in stored)


class Family(Protocol):
    """A way to cut a model. One object per file under `toolkit/families`, called FAMILY."""

    name: str
    usage: str
    """How its spec is written, for help texts."""
    summary: str
    averages_factors: bool
    """Whether updates of one size are averaged as they come, before they are recovered."""

    def split(
        self,
        model: nn.Module,
        sample_shape: tuple[int, ...],
        spec: Spec,
        training: TrainingConfig,
    ) -> Submodel:
        """Cut `model`. Raises SpecError where `spec` asks for what the model cannot give."""
        ...

    def strength(self, spec: Spec) -> float | None:
        """Strength (FedHM eq. 2) in (0, 1] that the size of `spec` says; None where it says none.

        Raises SpecError where there is no such size.
        """
        ...

    def recover(
        self, tensors: Mapping[str, Tensor], table: Sequence[TensorEntry], shapes: Shapes
    ) -> Mapping[str, Tensor | Product]:
        """Global tensors that an update stands for, each in its shape in `shapes`.

        `tensors` are the uploaded ones by bundle name and `table` says what each stands for.
        `shapes` are those of the global tensors, or of the parts that the update holds of them.
        """
        ...

    def refit(
        self,
        factors: Mapping[str, Tensor],
        table: Sequence[TensorEntry],
        weights: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Factors for the next round, near `factors`, of the new global `weights`.

        Only asked of families that average factors.
        """
        ...


class Stateless:
    """For families that keep nothing between rounds; recovering is renaming unless overridden."""

    averages_factors = False

    def strength(self, spec: Spec) -> float | None:
        """None: what is trained says it."""
        return None

    def recover(
        self, tensors: Mapping[str, Tensor], table: Sequence[TensorEntry], shapes: Shapes
    ) -> Mapping[str, Tensor | Product]:
        """See Family."""
        return recover_dense(tensors, table)

    def refit(
        self,
        factors: Mapping[str, Tensor],
        table: Sequence[TensorEntry],
        weights: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Nothing is kept."""
        return {}


def recover_dense(tensors: Mapping[str, Tensor], table: Sequence[TensorEntry]) -> dict[str, Tensor]:
    """The tensors that are no factors, under the names of the global tensors they stand for."""
    return {
        entry.stands_for: tensors[entry.name]
        for entry in table
        if entry.stands_for is not None and entry.factor is None
    }


def factors_of(
    tensors: Mapping[str, Tensor], table: Sequence[TensorEntry]
) -> dict[str, dict[str, Tensor]]:
    """Factors grouped by the global tensor they stand for, then by factor label."""
    groups: dict[str, dict[str, Tensor]] = {}
    for entry in table:
        if entry.factor is not None:
            if entry.stands_for is None:
                raise UpdateError(f"The factor {entry.name!r} stands for no global parameter.")
            groups.setdefault(entry.stands_for, {})[entry.factor] = tensors[entry.name]
    return groups


def count(shape: Sequence[int]) -> int:
    """Numbers in a tensor of `shape`."""
    total = 1
    for size in shape:
        total *= size
    return total
