"""Folding updates of any shape back into one global model.

Every update is recovered to global tensors, or parts of them, by its family, and each element is
averaged over the devices that trained it. Nothing here knows how updates arrive.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from device_agent.formats.manifest import TensorEntry
from device_agent.formats.update import UpdateRecord
from profiles.errors import UpdateError
from toolkit.aggregation.aggregation_policy import AggregationPolicy
from toolkit.aggregation.submodel_strength import strength, trainable
from toolkit.aggregation.update_validation import check_update, is_statistic
from toolkit.aggregation.weighted_mean import Mean
from toolkit.families import recovering_family
from toolkit.submodels.family import Family
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.matrix_product import Product
from toolkit.submodels.spec import parse_spec
from toolkit.submodels.submodel import Shapes, shapes_of
from toolkit.submodels.tensor_slices import group_by_global_tensor, slice_shapes, slices_by_tensor

Received = tuple[UpdateRecord, Mapping[str, np.ndarray]]
"""An update as `read_update` returns it."""

Table = tuple[TensorEntry, ...]


@dataclass
class FactorMean:
    """The updates of one submodel whose factors are averaged as they come (TDPFed's AFM)."""

    family: Family
    table: Table
    mean: Mean = field(default_factory=Mean)
    weight: float = 0.0


def aggregate(
    model: GlobalModel,
    updates: Iterable[Received],
    policy: AggregationPolicy = AggregationPolicy(),  # noqa: B008  frozen
) -> GlobalModel:
    """The next global model: each element moved by `policy` to the mean over those who trained it.

    What nobody trained stays as it is. Factors of families that keep them are also fitted anew to
    the resulting model (TDPFed eq. 22). One update is in memory at a time. Raises UpdateError for
    an update that does not fit `model`.
    """
    aggregation = Aggregation(model, policy)
    for record, arrays in updates:
        aggregation.add(record, arrays)
        del arrays  # or two updates are in memory while the next is read
    return aggregation.result()


class Aggregation:
    """The updates of one round on their way into `model`; needs the memory of a few models.

    The result does not depend on the order of `add`, and merging two aggregations of one model
    under one policy equals adding everything to one.
    """

    def __init__(self, model: GlobalModel, policy: AggregationPolicy) -> None:
        self.model, self.policy = model, policy
        self.shapes = shapes_of(model.tensors)
        self.mean = Mean()
        self.factors: dict[str, FactorMean] = {}
        self.trained: set[str] = set()

    def add(self, record: UpdateRecord, arrays: Mapping[str, np.ndarray]) -> None:
        """Take in one update. Raises UpdateError where it does not fit the model."""
        check_update(record, arrays, self.model.tensors)
        tensors = {name: torch.from_numpy(np.asarray(array)) for name, array in arrays.items()}
        spec = parse_spec(record.submodel)
        family, weight = recovering_family(spec), self._weight(record)
        self.trained |= {e.stands_for or "" for e in record.tensors if e.role == "parameter"}
        if family.averages_factors:
            self._add_factors(spec.head, family, record, tensors, weight)
        if not family.averages_factors or self.policy.factors == "act":
            self._add_recovered(family, tensors, record.tensors, weight)

    def merge(self, other: "Aggregation") -> None:
        """Take in all that `other`, of the same model and policy, took in."""
        self.mean.merge(other.mean)
        self.trained |= other.trained
        for key, theirs in other.factors.items():
            group = self._group(key, theirs.family, theirs.table)
            group.mean.merge(theirs.mean)
            group.weight += theirs.weight

    def result(self) -> GlobalModel:
        """The next global model; this aggregation is used up."""
        if self.policy.factors == "afm":
            for group in self.factors.values():
                averaged = group.mean.result()
                self._add_recovered(group.family, averaged, group.table, group.weight)
        if not self.mean.sums:
            raise UpdateError("There is no update to aggregate; give at least one.")
        tensors = {**self.model.tensors}
        for name in list(self.mean.sums):
            tensors[name] = self._next(name)
        kept = {
            key: group.family.refit(group.mean.result(), group.table, tensors)
            for key, group in self.factors.items()
        }
        return GlobalModel(tensors, {**self.model.kept, **kept})

    def _next(self, name: str) -> Tensor:
        """(1 - beta) * old + beta * mean (TDPFed, above eq. 22); forgets the mean.

        Statistics are never taken beyond the mean, where a variance can turn negative. Batch norm's
        are known by name, whatever an update calls them; others by all updates calling them so.
        """
        old = self.model.tensors[name]
        statistic = is_statistic(name) or name not in self.trained
        beta = min(self.policy.beta, 1.0) if statistic else self.policy.beta
        mean = self.mean.take(name, old)
        new = mean if beta == 1.0 else torch.lerp(old.float(), mean, beta)
        if not np.isfinite(new.numpy().sum(dtype=np.float64)):
            raise UpdateError(
                f"The updates of {name!r} add up to more than float32 holds; training diverged. "
                "Lower the learning rate."
            )
        return new.to(old.dtype)

    def _weight(self, record: UpdateRecord) -> float:
        by_strength = self.policy.weights == "softmax"
        shapes = trainable(self.model.tensors)
        gamma = strength(record.submodel, record.tensors, shapes) if by_strength else 1.0
        return self.policy.weight(record.samples, gamma)

    def _group(self, key: str, family: Family, table: Table) -> FactorMean:
        if key not in self.factors:
            check_recovers(family, table, self.shapes)
        group = self.factors.setdefault(key, FactorMean(family, table))
        if group.table != table:
            raise UpdateError(f"Two updates of {key!r} have different factors.")
        return group

    def _add_factors(
        self,
        key: str,
        family: Family,
        record: UpdateRecord,
        tensors: Mapping[str, Tensor],
        weight: float,
    ) -> None:
        group = self._group(key, family, record.tensors)
        group.mean.add(tensors, weight)
        group.weight += weight

    def _add_recovered(
        self, family: Family, tensors: Mapping[str, Tensor], table: Table, weight: float
    ) -> None:
        recovered = recover(family, tensors, table, slice_shapes(table, self.shapes))
        self.mean.add(recovered, weight, slices_by_tensor(table, self.shapes))


def recover(
    family: Family, tensors: Mapping[str, Tensor], table: Table, shapes: Shapes
) -> Mapping[str, Tensor | Product]:
    """What an update says of global tensors, or parts of them, of `shapes`.

    Raises UpdateError where its factors do not give all of these tensors in these shapes.
    """
    try:
        recovered = family.recover(tensors, table, shapes)
    except KeyError as error:
        name = _lacking(family, tensors, table, shapes)
        raise UpdateError(f"An update lacks the factor {error} of {name!r}.") from None
    except (RuntimeError, LookupError, ValueError) as error:
        raise UpdateError(f"An update's factors do not fit the global model: {error}.") from None
    named = {entry.stands_for for entry in table}
    for odd in sorted(map(str, named ^ recovered.keys())):
        raise UpdateError(
            f"An update gives factors of {odd!r}, of which the family {family.form.family!r} makes "
            "nothing: it is not of the submodel that it names."
        )
    for name, value in recovered.items():
        if tuple(value.shape) != shapes[name]:
            raise UpdateError(
                f"An update gives {name!r} the shape {tuple(value.shape)}; "
                f"the global model has {shapes[name]}."
            )
    return recovered


def check_recovers(family: Family, table: Table, shapes: Shapes) -> None:
    """Raise UpdateError as `recover` would, from the shapes in `table` alone."""
    tensors = {entry.name: torch.empty(entry.shape, device="meta") for entry in table}
    recover(family, tensors, table, slice_shapes(table, shapes))


def _lacking(
    family: Family, tensors: Mapping[str, Tensor], table: Table, shapes: Shapes
) -> str | None:
    """The global tensor that `family` cannot recover for lack of a factor."""
    for name, entries in group_by_global_tensor(table).items():
        try:
            family.recover(tensors, entries, shapes)
        except KeyError:
            return name
    return None
