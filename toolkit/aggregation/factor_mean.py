"""The mean of one submodel's factors, for families that keep factors from round to round."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from device_agent.formats.manifest import TensorEntry
from profiles.errors import UpdateError
from toolkit.aggregation.weighted_mean import Mean
from toolkit.submodels.class_rows import own_rows, ranges_of, row_places, rows_of
from toolkit.submodels.family import Family
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.matrix_product import Product
from toolkit.submodels.submodel import Shapes
from toolkit.submodels.tensor_slices import TensorSlice

Table = tuple[TensorEntry, ...]


@dataclass
class FactorMean:
    """The mean of the factors of one submodel's updates (TDPFed's AFM).

    Attributes:
        family: The family of the submodel.
        table: The tensors of the updates: factors, and tensors without factors.
        mean: The mean of all tensors in `table`.
        weight: The sum of the weights of the updates.
        weights: Maps a class to the total weight of the updates whose devices listed this class.
            The key None has the total weight of the updates with all classes.
    """

    family: Family
    table: Table
    mean: Mean = field(default_factory=Mean)
    weight: float = 0.0
    weights: dict[int | None, float] = field(default_factory=dict)

    def add(
        self,
        tensors: Mapping[str, Tensor],
        weight: float,
        classes: tuple[int, ...] | None,
        shapes: Shapes,
    ) -> None:
        """Add an update's tensors. The device has samples of `classes`; None means all classes."""
        _, left = own_rows(self.table, tensors, classes, shapes)
        self.mean.add(left, weight, row_places(self.table, classes))
        self._weigh(weight, dict.fromkeys([None] if classes is None else classes, weight))

    def merge(self, other: "FactorMean") -> None:
        """Add everything that was added to `other`."""
        self.mean.merge(other.mean)
        self._weigh(other.weight, other.weights)

    def _weigh(self, weight: float, weights: Mapping[int | None, float]) -> None:
        self.weight += weight
        for label, more in weights.items():
            self.weights[label] = self.weights.get(label, 0.0) + more

    def means(self, key: str, model: GlobalModel) -> dict[str, Tensor]:
        """The mean of each tensor by name. Rows that no device trained have the received values."""
        means = self.mean.result()
        lacking = [e for e in self.table if e.by_class and means[e.name].isnan().any()]
        if not lacking:
            return means
        factors = [e for e in self.table if e.factor is not None]
        old = {**self.family.received(key, factors, model)}
        for entry in lacking:
            known = old.get(entry.name, model.tensors.get(entry.stands_for or ""))
            assert known is not None
            means[entry.name] = means[entry.name].where(~means[entry.name].isnan(), known)
        return means

    def weighted_rows(
        self, name: str, value: Tensor | Product
    ) -> Iterator[tuple[Tensor | Product, float, TensorSlice | None]]:
        """Yield `value`, the mean of the global tensor `name`, with the weight of the updates.

        If the rows of the tensor belong to classes, yield each group of rows with equal weight, and
        the slice of the tensor that these rows fill.
        """
        known = {c: w for c, w in self.weights.items() if c is not None}
        if not known or not any(e.by_class and e.stands_for == name for e in self.table):
            yield value, self.weight, None
            return
        dense = value.dense() if isinstance(value, Product) else value
        weights = torch.full(dense.shape[:1], self.weights.get(None, 0.0), dtype=torch.float64)
        for number, weight in known.items():
            weights[number] += weight
        for weight in sorted(set(weights.tolist())):
            if weight > 0:
                rows = (weights == weight).nonzero().flatten().tolist()
                part = TensorSlice(tuple(dense.shape), rows_of(dense.shape, ranges_of(rows)))
                yield dense[rows], weight, part

    @cached_property
    def factorized(self) -> frozenset[str]:
        """The global tensors that have factors."""
        return frozenset(e.stands_for or "" for e in self.table if e.factor is not None)

    def moved(
        self, key: str, names: Collection[str], model: GlobalModel, beta: float
    ) -> dict[str, Tensor]:
        """Return (1 - beta) * old + beta * mean of each factor (TDPFed eq. 20), by name.

        Args:
            key: The submodel; `model` keeps its factors under this key.
            names: The global tensors whose factors are moved.
            model: The global model that the updates were trained from.
            beta: TDPFed's beta.

        Raises:
            UpdateError: If the updates have other factors than `model`.
        """
        means = self.means(key, model)
        factors = [e for e in self.table if e.stands_for in names]
        if beta == 1.0 or not factors:
            return {e.name: means[e.name] for e in factors}
        old = self.family.received(key, factors, model)
        for entry in factors:
            if entry.name not in old or tuple(old[entry.name].shape) != entry.shape:
                raise UpdateError(
                    "The factors of {stands_for!r} in the updates of {submodel!r} differ from "
                    "those of the global model. Train new updates from the global model.",
                    code="update.different-factors",
                    submodel=key,
                    stands_for=entry.stands_for,
                )
        return {e.name: (1 - beta) * old[e.name] + beta * means[e.name] for e in factors}
