"""Aggregates updates of any shape into one global model.

The family of an update (its way to make submodels) turns the update into global tensors, or into
parts of them. Each element is averaged over the devices that trained it. Nothing here depends on
how updates arrive.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from profiles.errors import InputError
from profiles.progress import Report, silent
from toolkit.aggregation.aggregation_policy import AggregationPolicy
from toolkit.aggregation.limits.reference import RoundLimits
from toolkit.aggregation.limits.update_limits import within_limits
from toolkit.aggregation.recover import Received as Received
from toolkit.aggregation.recover import RecoveredUpdate, recover_checked
from toolkit.aggregation.rules.rule_aggregation import limit_statistics, new_aggregation
from toolkit.aggregation.running_aggregation import Aggregation as Aggregation
from toolkit.aggregation.running_aggregation import no_update
from toolkit.aggregation.update_validation import check_update
from toolkit.submodels.global_model import GlobalModel

Strategy = Callable[[GlobalModel, Iterator[RecoveredUpdate]], Mapping[str, Tensor]]
"""(global model, updates) -> the new values of the global tensors that change, by name.

The updates can be iterated only once. Each update is recovered only when the iteration reaches it.
So if a strategy keeps only sums, memory never contains two updates."""


def aggregate(
    model: GlobalModel,
    updates: Iterable[Received],
    policy: AggregationPolicy = AggregationPolicy(),  # noqa: B008  frozen
    strategy: Strategy | None = None,
    *,
    limits: RoundLimits | None = None,
    trusted: Mapping[str, Tensor] | None = None,
    progress: Report = silent,
) -> GlobalModel:
    """Aggregate updates into the next global model.

    Use it at the end of a round, when all updates have arrived. If updates arrive one by one, use
    `Aggregation`.

    By default each element of the model moves towards its weighted mean over the updates that
    contain it. `policy` sets the weights, and how far the element moves. Elements that no update
    contains stay unchanged. One update is in memory at a time. The other rules of `policy` keep the
    updates in temporary files; see `RuleAggregation`.

    Some families keep the factors of a tensor from round to round. These factors move towards
    their mean in the same way (TDPFed eq. 20), and the new tensor is composed of them. If other
    updates contain the tensor itself, the tensor is averaged instead, and the factors are fitted to
    the new tensor (eq. 22).

    Args:
        model: The global model that the updates were trained from.
        updates: Records and arrays, as `read_update` returns them.
        policy: The weights of updates. Without `strategy`, it also sets how factors are averaged
            and how far the model moves.
        strategy: A function that replaces the weighted mean. The function gets every update
            recovered to full shapes, and returns new tensors. Default: the weighted mean.
        limits: Limits each update before it is aggregated. Default: no limits.
        trusted: For `rule="fltrust"`: how training on held-out samples changes the parameters of
            `model`, by global tensor. `Federation.trusted_change` computes it.
        progress: Called with the name of each stage when it begins.

    Returns:
        The next global model.

    Raises:
        UpdateError: If there is no update, or an update does not fit `model`.
        InputError: If `strategy` returns tensors that do not fit the model, or there is no
            `trusted` for the rule.

    Examples:
        >>> import torch
        >>> model = GlobalModel({"w": torch.zeros(2)})
        >>> aggregate(model, [])
        Traceback (most recent call last):
        ...
        profiles.errors.UpdateError: There is no update to aggregate. Give at least one.
    """
    checked = _checked_updates(updates, model, progress)
    return aggregate_checked(
        model, checked, policy, strategy, limits=limits, trusted=trusted, progress=progress
    )


def aggregate_checked(
    model: GlobalModel,
    updates: Iterable[Received],
    policy: AggregationPolicy,
    strategy: Strategy | None,
    *,
    limits: RoundLimits | None = None,
    trusted: Mapping[str, Tensor] | None = None,
    progress: Report = silent,
) -> GlobalModel:
    """Do the same as `aggregate`, but without the checks: `check_update` has accepted `updates`."""
    updates = within_limits(updates, limits, model, policy)
    if strategy is not None:
        return _aggregate_by(strategy, model, updates, policy)
    aggregation = new_aggregation(model, policy, trusted)
    for record, arrays in updates:
        aggregation.add_checked(record, arrays)
        del arrays  # otherwise two updates are in memory while the next one is read
    progress("computing the new model")
    limit_statistics(aggregation, limits)
    return aggregation.result()


def _checked_updates(
    updates: Iterable[Received], model: GlobalModel, progress: Report
) -> Iterator[Received]:
    """Yield each update after it was checked, and report it as a stage."""
    numbers = itertools.count(1)  # `enumerate` would keep an update until it has the next one
    for update in updates:
        progress(f"adding update {next(numbers)}: {update[0].submodel}")
        check_update(*update, model.tensors)
        yield update
        del update  # otherwise two updates are in memory while the next one is read


def _aggregate_by(
    strategy: Strategy,
    model: GlobalModel,
    updates: Iterable[Received],
    policy: AggregationPolicy,
) -> GlobalModel:
    """Compute the next global model with a user's strategy."""
    factors = Aggregation(model, replace(policy, rule="mean"))
    count = 0

    def recovered() -> Iterator[RecoveredUpdate]:
        nonlocal count
        for update in updates:
            count += 1
            recovered_update = recover_checked(update, model, policy)
            factors.add_factors(*update)
            factors.note_tensors(update[0])
            yield recovered_update

    iterator = recovered()
    new = strategy(model, iterator)
    for _ in iterator:  # kept factors also need the updates that the strategy has not read
        pass
    if not count:
        raise no_update()
    tensors = {**model.tensors, **factors.counters.values()}
    for name, value in new.items():
        tensors[name] = _checked(name, value, model)
    return factors.next_model(tensors, {})


def _checked(name: str, value: Tensor, model: GlobalModel) -> Tensor:
    """Return a strategy's `value` in the type of the global tensor `name`. Raises InputError."""
    if name not in model.tensors:
        raise InputError(
            "The strategy returned {parameter!r}, which the global model does not have.",
            code="aggregate.unknown-tensor",
            parameter=name,
        )
    old = model.tensors[name]
    if value.shape != old.shape:
        raise InputError(
            "The strategy returned {parameter!r} with the shape {shape}; the global model has "
            "{expected_shape}.",
            code="aggregate.wrong-shape",
            parameter=name,
            shape=tuple(value.shape),
            expected_shape=tuple(old.shape),
        )
    if not torch.isfinite(value).all():
        raise InputError(
            "The strategy returned {parameter!r} with a number that is not finite.",
            code="aggregate.not-finite",
            parameter=name,
        )
    # A copy, because a strategy may return one tensor for several.
    return value.to(old.dtype, copy=True)
