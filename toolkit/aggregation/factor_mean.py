"""The mean of one submodel's factors, for families that keep factors from round to round."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from device_agent.formats.manifest import TensorEntry
from profiles.errors import UpdateError
from toolkit.aggregation.update_weights import UpdateWeights
from toolkit.aggregation.weighted_mean import Mean
from toolkit.submodels.class_rows import own_rows, ranges_of, row_places, rows_of
from toolkit.submodels.family import Family
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.matrix_product import Product
from toolkit.submodels.submodel import Shapes, shapes_of
from toolkit.submodels.tensor_slices import TensorSlice, slice_of, slice_shapes, take_slice

Table = tuple[TensorEntry, ...]


@dataclass
class FactorMean:
    """The mean of the factors of one submodel's updates (TDPFed's AFM).

    Attributes:
        family: The family of the submodel.
        table: The tensors of the updates: factors, and tensors without factors.
        mean: The mean of all tensors in `table`.
        weights: The sum of the weights n of the updates.
        lost: The sum of (1 - s) n. The change of an update from an earlier version of the
            model is scaled by s < 1. For other updates s is 1.
    """

    family: Family
    table: Table
    mean: Mean = field(default_factory=Mean)
    weights: UpdateWeights = field(default_factory=UpdateWeights)
    lost: UpdateWeights = field(default_factory=UpdateWeights)

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
        labels = [None] if classes is None else classes
        self.weights.add(UpdateWeights(weight, dict.fromkeys(labels, weight)))

    def merge(self, other: "FactorMean") -> None:
        """Add everything that was added to `other`."""
        self.mean.merge(other.mean)
        self.weights.add(other.weights)
        self.lost.add(other.lost)

    def replace(self, name: str, means: Tensor) -> None:
        """Use `means` as the mean of the global tensor `name`, if the updates contain it."""
        for entry in self.table:
            if entry.stands_for == name and entry.factor is None:
                part = slice_of(entry, tuple(means.shape))
                own = means if part is None else take_slice(means, part.ranges)
                self.mean.replace(entry.name, own)

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

    def recover(
        self, key: str, tensors: Mapping[str, Tensor], table: Table, model: GlobalModel
    ) -> Mapping[str, Tensor | Product]:
        """Recover the global tensors of `table` from `tensors`: the means, or the moved factors.

        Let w be a tensor of `model`, c(f) the tensor that its kept factors f compose, and c the new
        composed tensor. Then c - w is the sum of the change by training, c - c(f), and the error of
        the fit, c(f) - w. Factors of stale updates have already moved less. This method also
        reduces the error. The result is c - (1 - S / N) (c(f) - w), with S = sum s n and N = sum n.
        Without stale updates, the result is c.
        """
        shapes = slice_shapes(table, shapes_of(model.tensors))
        recovered = {**self.family.recover(tensors, table, shapes)}
        factors = tuple(e for e in table if e.factor is not None)
        if not self.lost.total or not factors:
            return recovered
        received = self.family.received(key, factors, model)
        # In float64, because the difference of the two composed tensors is small.
        new, old = (
            self.family.recover({e.name: v[e.name].double() for e in factors}, factors, shapes)
            for v in (tensors, received)
        )
        for name, value in new.items():
            lacking = _dense(old[name]) - model.tensors[name]
            share = self._lost_share(name, lacking)
            recovered[name] = (_dense(value) - share * lacking).float()
        return recovered

    def _lost_share(self, name: str, value: Tensor) -> float | Tensor:
        """1 - S / N for the tensor `name`; one number for each row if rows differ."""
        if not self._rows_differ(name):
            return self.lost.total / self.weights.total
        lost, weights = (w.of_rows(len(value)) for w in (self.lost, self.weights))
        return (lost / weights.where(weights > 0, 1.0)).reshape(-1, *[1] * (value.ndim - 1))

    def _rows_differ(self, name: str) -> bool:
        own = any(e.by_class and e.stands_for == name for e in self.table)
        return own and self.weights.differ

    def weighted_rows(
        self, name: str, value: Tensor | Product
    ) -> Iterator[tuple[Tensor | Product, float, TensorSlice | None]]:
        """Yield `value`, the mean of the global tensor `name`, with the weight of the updates.

        If the rows of the tensor belong to classes, yield each group of rows with equal weight, and
        the slice of the tensor that these rows fill.
        """
        if not self._rows_differ(name):
            yield value, self.weights.total, None
            return
        dense = _dense(value)
        weights = self.weights.of_rows(len(dense))
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
        check_factors(key, factors, old)
        return {e.name: (1 - beta) * old[e.name] + beta * means[e.name] for e in factors}


def check_factors(key: str, table: Iterable[TensorEntry], received: Mapping[str, Tensor]) -> None:
    """Raise UpdateError unless `table` has the factors that devices of submodel `key` received."""
    for entry in table:
        if entry.name not in received or tuple(received[entry.name].shape) != entry.shape:
            raise UpdateError(
                "The factors of {stands_for!r} in the updates of {submodel!r} differ from "
                "those of the global model. Train new updates from the global model.",
                code="update.different-factors",
                submodel=key,
                stands_for=entry.stands_for,
            )


def _dense(value: Tensor | Product) -> Tensor:
    return value.dense() if isinstance(value, Product) else value
