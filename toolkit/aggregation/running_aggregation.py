"""A running aggregation: updates are added one by one, in any order."""

from collections import Counter
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from device_agent.formats.update import UpdateRecord
from profiles.errors import InputError, UpdateError
from toolkit.aggregation.aggregation_policy import AggregationPolicy
from toolkit.aggregation.batch_counters import BatchCounters
from toolkit.aggregation.factor_mean import FactorMean, Table
from toolkit.aggregation.limits.reference import RoundLimits
from toolkit.aggregation.recover import as_tensors, weight_of
from toolkit.aggregation.server_optimizers import server_step
from toolkit.aggregation.update_validation import (
    check_update,
    is_statistic,
)
from toolkit.aggregation.weighted_mean import Mean
from toolkit.families import recovering_family
from toolkit.submodels.class_rows import own_rows
from toolkit.submodels.family import Family
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.spec import parse_spec
from toolkit.submodels.submodel import shapes_of
from toolkit.submodels.tensor_slices import slice_shapes, slices_by_tensor


class Aggregation:
    """A running aggregation of one round's updates. It needs the memory of a few models.

    Use it if updates arrive one by one, or on several machines (`write_partial`, `read_partial`).
    If all updates have already arrived, call `aggregate` instead.

    The result does not depend on the order of `add`. Merging two aggregations with the same model
    and policy gives the same result as adding all updates to one of them.

    Args:
        model: The global model that the updates were trained from.
        policy: The weights of updates and how far the model moves.

    Attributes:
        updates: How many updates were added.

    Raises:
        InputError: The rule of the policy is not the mean.

    Examples:
        >>> from device_agent.formats.update import read_update
        >>> aggregation = Aggregation(model, AggregationPolicy())  # doctest: +SKIP
        >>> aggregation.add(*read_update("update"))  # doctest: +SKIP
        >>> new = aggregation.result()  # doctest: +SKIP
    """

    def __init__(self, model: GlobalModel, policy: AggregationPolicy) -> None:
        check_rule(policy)
        self.model, self.policy = model, policy
        self.shapes = shapes_of(model.tensors)
        self.mean = Mean()
        self.factors: dict[str, FactorMean] = {}
        self.trained: set[str] = set()
        self.counters = BatchCounters(model.tensors)
        self.updates = 0

    def add(self, record: UpdateRecord, arrays: Mapping[str, np.ndarray]) -> None:
        """Add one update. Raises UpdateError if it does not fit the model."""
        check_update(record, arrays, self.model.tensors)
        self.add_checked(record, arrays)

    def add_checked(self, record: UpdateRecord, arrays: Mapping[str, np.ndarray]) -> None:
        """Add an update that `check_update` has accepted.

        Raises UpdateError if an earlier update of its family and size has other factors.
        """
        family = recovering_family(parse_spec(record.submodel))
        self.note_tensors(record)
        self.add_factors(record, arrays)
        # AFM recovers the mean of all factors once, in `result`.
        if not family.averages_factors or self.policy.factors == "act":
            weight = weight_of(record, self.model, self.policy)
            table, tensors = own_rows(
                record.tensors, as_tensors(arrays), record.classes, self.shapes
            )
            self._add_recovered(family, tensors, table, weight)
        self.updates += 1

    def note_tensors(self, record: UpdateRecord) -> None:
        """Note which tensors an update trains, and how far its counters advance."""
        self.trained |= {e.stands_for or "" for e in record.tensors if e.role == "parameter"}
        self.counters.add(record)

    def add_factors(self, record: UpdateRecord, arrays: Mapping[str, np.ndarray]) -> None:
        """Add only the factors of a checked update, if its family keeps factors between rounds."""
        spec = parse_spec(record.submodel)
        family = recovering_family(spec)
        if not family.averages_factors:
            return
        weight = weight_of(record, self.model, self.policy)
        group = self.group(spec.head, family, record.tensors)
        group.add(as_tensors(arrays), weight, record.classes, self.shapes)

    def merge(self, other: "Aggregation") -> None:
        """Add all updates of `other`, which has the same model and policy.

        Raises UpdateError if updates of one submodel contain different tensors.
        """
        self.mean.merge(other.mean)
        self.trained |= other.trained
        self.counters.merge(other.counters)
        self.updates += other.updates
        for key, theirs in other.factors.items():
            group = self.group(key, theirs.family, theirs.table)
            group.merge(theirs)

    def limit_statistics(self, limits: RoundLimits) -> None:
        """Limit batch norm's statistics of all updates; see `norm_statistics.py`.

        Call it once, after the last update. `limits` has the figures of the same updates.
        """
        known = {
            name: value.detach().float().numpy()
            for name, value in self.model.tensors.items()
            if is_statistic(name)
        }
        for name, values in limits.statistics(known).items():
            means = torch.from_numpy(values)
            if name in self.mean.sums:
                self.mean.replace(name, means)
            for group in self.factors.values():
                group.replace(name, means)

    def group(self, key: str, family: Family, table: Table) -> FactorMean:
        """The mean of the factors of submodel `key`. Its updates contain the tensors in `table`.

        Raises UpdateError if earlier updates of this submodel contain other tensors.
        """
        group = self.factors.setdefault(key, FactorMean(family, table))
        if group.table != table:
            raise UpdateError(
                "Two updates of {submodel!r} have different factors.",
                code="update.different-factors",
                submodel=key,
            )
        return group

    def compose(self, key: str) -> None:
        """For submodel `key`, average the composed tensors instead of the factors."""
        group = self.factors.pop(key)
        if self.policy.factors == "afm":  # otherwise `add_checked` has composed them
            self._add_group(key, group, group.table)

    def result(self) -> GlobalModel:
        """The next global model. The aggregation cannot be used afterwards.

        Raises UpdateError if no update was added, or if a number is too large for float32.
        """
        moved = self.moved_factors()
        for key, factors in moved.items():
            group = self.factors[key]
            self._add_group(key, group, tuple(e for e in group.table if e.name not in factors))
        return self.finished(moved)

    def finished(self, moved: Mapping[str, Mapping[str, Tensor]]) -> GlobalModel:
        """The next global model. Tensors are composed of the factors `moved`; others are means."""
        tensors = {**self.model.tensors}
        for key, factors in moved.items():
            group = self.factors[key]
            table = tuple(e for e in group.table if e.name in factors)
            for name, value in group.recover(key, factors, table, self.model).items():
                assert isinstance(value, Tensor)
                tensors[name] = check_finite(name, value)
        if not self.mean.sums and not any(moved.values()):
            raise no_update()
        for name in list(self.mean.sums):
            tensors[name] = self._next(name)
        tensors |= self.counters.values()
        return self.next_model(tensors, moved)

    def next_model(
        self, tensors: Mapping[str, Tensor], moved: Mapping[str, Mapping[str, Tensor]]
    ) -> GlobalModel:
        """The next global model, after a step of the server optimizer if there is one.

        Args:
            tensors: The aggregated tensors.
            moved: The kept factors that `tensors` were composed of, by submodel. Other factors are
                fitted to the new tensors. After a step of a server optimizer, all factors are
                fitted.
        """
        moments = self.model.moments
        if self.policy.server_optimizer is not None:
            tensors, moments = server_step(self.model, tensors, self.trained, self.policy)
            moved = {}
            for name, value in tensors.items():
                check_finite(name, value)
        kept = {**self.model.kept, **self.refitted(tensors, moved)}
        return GlobalModel(tensors, kept, shared=self.model.shared, moments=moments)

    def refitted(
        self, tensors: Mapping[str, Tensor], moved: Mapping[str, Mapping[str, Tensor]]
    ) -> dict[str, dict[str, Tensor]]:
        """Fit factors to the new global `tensors`, for the next round; returns them by submodel.

        Factors in `moved` are not fitted, because the new tensors were composed of them.
        """
        fitted = {}
        for key, group in self.factors.items():
            known = moved.get(key, {})
            others = [e for e in group.table if e.name not in known]
            means = group.means(key, self.model)
            fitted[key] = {**known, **group.family.refit(means, others, tensors)}
        return fitted

    def moved_factors(self) -> dict[str, dict[str, Tensor]]:
        """Return factors moved by TDPFed eq. 20, by submodel. Empty with `act`.

        The factors of a tensor are moved only if no other update of the round contains the tensor
        itself. Otherwise the tensor is averaged and moved instead.
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
        """Return (1 - beta) * old + beta * mean (TDPFed, above eq. 22), and drop the mean.

        Statistics never move beyond the mean, because a variance could become negative. Batch
        norm's statistics are recognised by name, even if an update gives them another role. Another
        tensor is a statistic if no update lists it as a parameter.
        """
        old = self.model.tensors[name]
        statistic = is_statistic(name) or name not in self.trained
        beta = min(self.policy.beta, 1.0) if statistic else self.policy.beta
        mean = self.mean.take(name, old)
        new = mean if beta == 1.0 else torch.lerp(old.float(), mean, beta)
        return check_finite(name, new).to(old.dtype)

    def _add_group(self, key: str, group: FactorMean, table: Table) -> None:
        """Recover the tensors of `table` from the mean of a group's factors, and add them."""
        means = group.means(key, self.model)
        for name, value in group.recover(key, means, table, self.model).items():
            for part, weight, rows in group.weighted_rows(name, value):
                self.mean.add({name: part}, weight, {name: rows} if rows else None)

    def _add_recovered(
        self, family: Family, tensors: Mapping[str, Tensor], table: Table, weight: float
    ) -> None:
        recovered = family.recover(tensors, table, slice_shapes(table, self.shapes))
        self.mean.add(recovered, weight, slices_by_tensor(table, self.shapes))


def check_rule(policy: AggregationPolicy) -> None:
    """Raise InputError if the rule of `policy` is not the mean. Other rules need all updates."""
    if policy.rule != "mean":
        raise InputError(
            'The rule "{rule}" needs all updates of a round together. This aggregation gets '
            "updates one by one or from several places, and supports only the mean. Set rule to "
            "mean, or use `aggregate`.",
            code="aggregate.rule-needs-all",
            rule=policy.rule,
        )


def check_finite(name: str, new: Tensor) -> Tensor:
    """Return `new`, the next value of the global tensor `name`. Raises UpdateError on overflow."""
    # One sum instead of isfinite on every element: no temporary of the tensor's size.
    if not np.isfinite(new.numpy().sum(dtype=np.float64)):
        raise UpdateError(
            "The sum of the updates of {parameter!r} is too large for float32: training diverged. "
            "Lower the learning rate.",
            code="aggregate.overflow",
            parameter=name,
        )
    return new


def no_update() -> UpdateError:
    """The error for a round without updates."""
    return UpdateError(
        "There is no update to aggregate. Give at least one.", code="aggregate.no-update"
    )
