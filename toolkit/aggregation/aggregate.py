"""Aggregating updates of any shape into one global model.

Every update is recovered by its family to global tensors, or parts of them, and each element is
averaged over the devices that trained it. Nothing here knows how updates arrive.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from device_agent.formats.update import UpdateRecord
from profiles.errors import InputError, UpdateError
from toolkit.aggregation.aggregation_policy import AggregationPolicy
from toolkit.aggregation.factor_mean import FactorMean, Table
from toolkit.aggregation.recover import Received as Received
from toolkit.aggregation.recover import (
    RecoveredUpdate,
    as_tensors,
    check_recovers,
    recover,
    recover_tensors,
    weight_of,
)
from toolkit.aggregation.update_validation import check_update, is_statistic
from toolkit.aggregation.weighted_mean import Mean
from toolkit.families import recovering_family
from toolkit.submodels.family import Family
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.spec import parse_spec
from toolkit.submodels.submodel import shapes_of
from toolkit.submodels.tensor_slices import slice_shapes, slices_by_tensor

Strategy = Callable[[GlobalModel, Iterator[RecoveredUpdate]], Mapping[str, Tensor]]
"""(global model, updates) -> the new values of the global tensors that change, by name.

The updates can be iterated once. Each is recovered when it is reached, so a strategy that keeps
only sums never holds two updates in memory."""


def aggregate(
    model: GlobalModel,
    updates: Iterable[Received],
    policy: AggregationPolicy = AggregationPolicy(),  # noqa: B008  frozen
    strategy: Strategy | None = None,
) -> GlobalModel:
    """Aggregate updates into the next global model.

    By default each element moves to the weighted mean over the updates that hold it, as `policy`
    says. Elements that no update holds stay unchanged. One update is in memory at a time.

    A family that keeps factors moves them to their mean in the same way (TDPFed eq. 20). A tensor
    that only these factors stand for is composed of them. If other updates hold it too, the factors
    are fitted to the resulting tensor (eq. 22).

    Args:
        model: The global model that the updates were trained from.
        updates: Records and arrays, as `read_update` returns them.
        policy: The weights of updates, and for the default strategy how factors are averaged and
            how far the model moves.
        strategy: Replaces the weighted mean. It gets every update recovered to full shapes and
            returns new tensors. Default: the weighted mean.

    Returns:
        The next global model.

    Raises:
        UpdateError: If an update does not fit `model`, or if there is none.
        InputError: If `strategy` returns tensors that do not fit the model.

    Examples:
        >>> import torch
        >>> model = GlobalModel({"w": torch.zeros(2)})
        >>> aggregate(model, [])
        Traceback (most recent call last):
        ...
        profiles.errors.UpdateError: There is no update to aggregate. Give at least one.
    """
    if strategy is not None:
        return _aggregate_by(strategy, model, updates, policy)
    aggregation = Aggregation(model, policy)
    for record, arrays in updates:
        aggregation.add(record, arrays)
        del arrays  # otherwise two updates are in memory while the next one is read
    return aggregation.result()


def _aggregate_by(
    strategy: Strategy,
    model: GlobalModel,
    updates: Iterable[Received],
    policy: AggregationPolicy,
) -> GlobalModel:
    """The next global model by a user's strategy."""
    factors = Aggregation(model, policy)
    count = 0

    def recovered() -> Iterator[RecoveredUpdate]:
        nonlocal count
        for update in updates:
            count += 1
            one = recover(update, model, policy)
            factors.add_factors(*update)
            yield one

    iterator = recovered()
    new = strategy(model, iterator)
    for _ in iterator:  # kept factors need every update, whatever the strategy used
        pass
    if not count:
        raise _no_update()
    tensors = {**model.tensors}
    for name, value in new.items():
        tensors[name] = _checked(name, value, model)
    return GlobalModel(tensors, {**model.kept, **factors.refitted(tensors, {})})


def _checked(name: str, value: Tensor, model: GlobalModel) -> Tensor:
    """A strategy's tensor in the type of the global tensor `name`. Raises InputError."""
    if name not in model.tensors:
        raise InputError(
            f"The strategy returned {name!r}, which the global model does not have.",
            code="aggregate.unknown-tensor",
            parameter=name,
        )
    old = model.tensors[name]
    if value.shape != old.shape:
        raise InputError(
            f"The strategy returned {name!r} with the shape {tuple(value.shape)}; the global model "
            f"has {tuple(old.shape)}.",
            code="aggregate.wrong-shape",
            parameter=name,
            shape=list(value.shape),
            expected_shape=list(old.shape),
        )
    if not torch.isfinite(value).all():
        raise InputError(
            f"The strategy returned a number in {name!r} that is not finite.",
            code="aggregate.not-finite",
            parameter=name,
        )
    return value.to(old.dtype)


class Aggregation:
    """A running aggregation of one round's updates. It needs the memory of a few models.

    The result does not depend on the order of `add`. Merging two aggregations of one model under
    one policy equals adding all updates to one.

    Args:
        model: The global model that the updates were trained from.
        policy: The weights of updates and how far the model moves.
    """

    def __init__(self, model: GlobalModel, policy: AggregationPolicy) -> None:
        self.model, self.policy = model, policy
        self.shapes = shapes_of(model.tensors)
        self.mean = Mean()
        self.factors: dict[str, FactorMean] = {}
        self.trained: set[str] = set()

    def add(self, record: UpdateRecord, arrays: Mapping[str, np.ndarray]) -> None:
        """Add one update. Raises UpdateError if it does not fit the model."""
        check_update(record, arrays, self.model.tensors)
        family = recovering_family(parse_spec(record.submodel))
        self.trained |= {e.stands_for or "" for e in record.tensors if e.role == "parameter"}
        self.add_factors(record, arrays)
        # AFM recovers the mean of all factors once, in `result`.
        if not family.averages_factors or self.policy.factors == "act":
            weight = weight_of(record, self.model, self.policy)
            self._add_recovered(family, as_tensors(arrays), record.tensors, weight)

    def add_factors(self, record: UpdateRecord, arrays: Mapping[str, np.ndarray]) -> None:
        """Add only the factors of a checked update, if its family keeps factors."""
        spec = parse_spec(record.submodel)
        family = recovering_family(spec)
        if not family.averages_factors:
            return
        weight = weight_of(record, self.model, self.policy)
        group = self._group(spec.head, family, record.tensors)
        group.mean.add(as_tensors(arrays), weight)
        group.weight += weight

    def merge(self, other: "Aggregation") -> None:
        """Add all updates of `other`, which has the same model and policy."""
        self.mean.merge(other.mean)
        self.trained |= other.trained
        for key, theirs in other.factors.items():
            group = self._group(key, theirs.family, theirs.table)
            group.mean.merge(theirs.mean)
            group.weight += theirs.weight

    def result(self) -> GlobalModel:
        """The next global model. The aggregation cannot be used afterwards."""
        tensors = {**self.model.tensors}
        moved = self._moved_factors()
        for key, factors in moved.items():
            group = self.factors[key]
            table = tuple(e for e in group.table if e.name in factors)
            for name, value in recover_tensors(group.family, factors, table, self.shapes).items():
                assert isinstance(value, Tensor)
                tensors[name] = check_finite(name, value)
            if self.policy.factors == "afm":
                others = tuple(e for e in group.table if e.name not in factors)
                self._add_recovered(group.family, group.mean.result(), others, group.weight)
        if not self.mean.sums and not any(moved.values()):
            raise _no_update()
        for name in list(self.mean.sums):
            tensors[name] = self._next(name)
        return GlobalModel(tensors, {**self.model.kept, **self.refitted(tensors, moved)})

    def refitted(
        self, tensors: Mapping[str, Tensor], moved: Mapping[str, Mapping[str, Tensor]]
    ) -> dict[str, dict[str, Tensor]]:
        """Factors of the new global `tensors` for the next round, by submodel.

        Factors in `moved` stay as they are, because their tensors were composed of them.
        """
        found = {}
        for key, group in self.factors.items():
            known = moved.get(key, {})
            others = [e for e in group.table if e.name not in known]
            found[key] = {**known, **group.family.refit(group.mean.result(), others, tensors)}
        return found

    def _moved_factors(self) -> dict[str, dict[str, Tensor]]:
        """By submodel: factors by eq. 20, of the tensors that no other update of the round holds.

        Where other updates hold a tensor too, the tensor is averaged and moves instead.
        """
        if self.policy.factors != "afm":
            return {}
        held = Counter(self.mean.sums.keys())
        for group in self.factors.values():
            held.update({e.stands_for or "" for e in group.table})
        return {
            key: group.moved(
                key,
                {name for name in group.factorized if held[name] == 1},
                self.model,
                self.policy.beta,
            )
            for key, group in self.factors.items()
        }

    def _next(self, name: str) -> Tensor:
        """(1 - beta) * old + beta * mean (TDPFed, above eq. 22); drops the mean.

        Statistics never move beyond the mean, because a variance could become negative. Batch
        norm's are known by name, whatever role an update gives them. Other tensors are statistics
        if every update says so.
        """
        old = self.model.tensors[name]
        statistic = is_statistic(name) or name not in self.trained
        beta = min(self.policy.beta, 1.0) if statistic else self.policy.beta
        mean = self.mean.take(name, old)
        new = mean if beta == 1.0 else torch.lerp(old.float(), mean, beta)
        return check_finite(name, new).to(old.dtype)

    def _group(self, key: str, family: Family, table: Table) -> FactorMean:
        if key not in self.factors:
            check_recovers(family, table, self.shapes)
        group = self.factors.setdefault(key, FactorMean(family, table))
        if group.table != table:
            raise UpdateError(
                f"Two updates of {key!r} have different factors.",
                code="update.different-factors",
                submodel=key,
            )
        return group

    def _add_recovered(
        self, family: Family, tensors: Mapping[str, Tensor], table: Table, weight: float
    ) -> None:
        recovered = recover_tensors(family, tensors, table, slice_shapes(table, self.shapes))
        self.mean.add(recovered, weight, slices_by_tensor(table, self.shapes))


def check_finite(name: str, new: Tensor) -> Tensor:
    """`new`, the next value of the global tensor `name`. Raises UpdateError if it overflowed."""
    # One sum instead of isfinite on every element: no temporary of the tensor's size.
    if not np.isfinite(new.numpy().sum(dtype=np.float64)):
        raise UpdateError(
            f"The updates of {name!r} add up to more than float32 holds; training diverged. "
            "Lower the learning rate.",
            code="aggregate.overflow",
            parameter=name,
        )
    return new


def _no_update() -> UpdateError:
    return UpdateError(
        "There is no update to aggregate. Give at least one.", code="aggregate.no-update"
    )
