"""The mean of one submodel's factors, for families that keep factors from round to round."""

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from device_agent.formats.manifest import TensorEntry
from profiles.errors import UpdateError
from toolkit.aggregation.weighted_mean import Mean
from toolkit.submodels.family import Family
from toolkit.submodels.global_model import GlobalModel

Table = tuple[TensorEntry, ...]


@dataclass
class FactorMean:
    """The mean of the factors of one submodel's updates (TDPFed's AFM).

    Attributes:
        family: The family of the submodel.
        table: What the updates hold: factors, and tensors without factors.
        mean: The mean of all tensors in `table`.
        weight: The sum of the weights of the updates.
    """

    family: Family
    table: Table
    mean: Mean = field(default_factory=Mean)
    weight: float = 0.0

    @cached_property
    def factorized(self) -> frozenset[str]:
        """The global tensors that have factors."""
        return frozenset(e.stands_for or "" for e in self.table if e.factor is not None)

    def moved(
        self, key: str, names: Collection[str], model: GlobalModel, beta: float
    ) -> dict[str, Tensor]:
        """(1 - beta) * old + beta * mean of factors (TDPFed eq. 20), by name.

        Args:
            key: The submodel, under which `model` keeps factors.
            names: The global tensors whose factors are moved.
            model: The global model that the updates were trained from.
            beta: TDPFed's beta.

        Raises:
            UpdateError: If the updates have other factors than `model`.
        """
        means = self.mean.result()
        factors = [e for e in self.table if e.stands_for in names]
        if beta == 1.0 or not factors:
            return {e.name: means[e.name] for e in factors}
        old = self.family.received(key, factors, model)
        for entry in factors:
            if entry.name not in old or tuple(old[entry.name].shape) != entry.shape:
                raise UpdateError(
                    f"The updates of {key!r} have other factors of {entry.stands_for!r} than the "
                    "global model. Train them from this model.",
                    code="update.different-factors",
                    submodel=key,
                )
        return {e.name: (1 - beta) * old[e.name] + beta * means[e.name] for e in factors}
