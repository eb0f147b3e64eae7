"""Updates that were trained from an earlier version of the global model (FedBuff).

An asynchronous round aggregates the first K updates that arrive. These may come from different
versions of the model. The staleness tau of an update is the number of versions that were made since
its version. FedBuff (Nguyen et al. 2022) adds changes to the model:

    w_t + sum_i s(tau_i) n_i (u_i - w_v) / sum_i n_i,    s(tau) = 1 / sqrt(1 + tau)

u_i is an update of weight n_i, recovered to global tensors. w_v is the version that this update was
trained from. Each element has its own sums, over the updates that contain it. As in FedBuff (1 /
K), the divisor does not contain s. Otherwise a buffer of only old updates would move the model as
far as new updates.

The sum equals the mean of moved updates w_t + s(tau_i) (u_i - w_v). So an aggregation of one
version's updates is moved to the newest model and then merged like any other aggregation. Updates
of the newest version do not change. If a round has only such updates, its result equals the result
of a synchronous round, bit for bit.

Kept factors move in the same way. The tensor that they compose differs from the model's tensor by
the error of their fit. This error also gets less weight; see `FactorMean.recover`.
"""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

from toolkit.aggregation.factor_mean import FactorMean
from toolkit.aggregation.recover import Received
from toolkit.aggregation.running_aggregation import Aggregation
from toolkit.aggregation.update_validation import is_statistic
from toolkit.aggregation.weighted_mean import Mean
from toolkit.submodels.global_model import GlobalModel

Moves = Mapping[str, tuple[Tensor, Tensor]]
"""Maps the name of a tensor to its value in the old and in the newest model."""


class StaleUpdates(NamedTuple):
    """Updates that were trained from the version `model`, which is `staleness` versions old."""

    staleness: int
    model: GlobalModel
    updates: Iterable[Received]


def staleness_weight(staleness: int) -> float:
    """The factor s of an update's change: 1 / sqrt(1 + staleness), as in FedBuff.

    Examples:
        >>> staleness_weight(0), staleness_weight(3)
        (1.0, 0.5)
    """
    return 1 / math.sqrt(1 + staleness)


def add_stale(aggregation: Aggregation, stale: StaleUpdates) -> None:
    """Add updates of an earlier version, which `check_update` has accepted, to `aggregation`.

    This takes the memory of a second aggregation, and of one update at a time.
    """
    own = Aggregation(stale.model, aggregation.policy)
    for record, arrays in stale.updates:
        own.add_checked(record, arrays)
        del arrays  # otherwise two updates are in memory while the next one is read
    merge_stale(aggregation, own, stale.staleness)


def merge_stale(aggregation: Aggregation, stale: Aggregation, staleness: int) -> None:
    """Merge `stale`, whose model is `staleness` versions old, into `aggregation`.

    `stale` cannot be used afterwards. Factors that are kept between rounds move in the same way,
    from the factors of the old model to the factors of the newest model. If the old model did not
    keep its factors, they cannot be compared. Then the composed tensors move; see
    `Federation.keep_factors`.
    """
    old, new, scale = stale.model, aggregation.model, staleness_weight(staleness)
    untrained = old.tensors.keys() - stale.trained
    for key in stale.factors.keys() - old.kept.keys():
        stale.compose(key)
    move(stale.mean, _moves(stale.mean.sums, old, new, untrained), scale)
    for key, group in stale.factors.items():
        move(group.mean, _factor_moves(key, group, old, new), scale)
        group.lost.add(group.weights, 1 - scale)
    aggregation.merge(stale)


def move(mean: Mean, moves: Moves, scale: float) -> None:
    """Replace every value that was added to `mean` by: newest + scale * (value - old)."""
    for name, (old, new) in moves.items():
        offset = new.double() - scale * old.double()
        mean.sums[name].total.mul_(scale).add_(offset.mul_(mean.share(name)))


def _moves(
    names: Iterable[str], old: GlobalModel, new: GlobalModel, untrained: Iterable[str] = ()
) -> dict[str, tuple[Tensor, Tensor]]:
    """The moves of the global tensors `names`.

    A statistic is measured, not trained, so its old value does not matter. A change of a variance
    could also make another variance negative. So a statistic moves from the newest value towards
    the measured value.
    """
    measured = {name for name in names if is_statistic(name)} | set(untrained)
    return {
        name: ((new if name in measured else old).tensors[name], new.tensors[name])
        for name in names
    }


def _factor_moves(
    key: str, group: FactorMean, old: GlobalModel, new: GlobalModel
) -> dict[str, tuple[Tensor, Tensor]]:
    """The moves of all tensors of a submodel that keeps factors, by their names in the bundle."""
    factors = [entry for entry in group.table if entry.factor is not None]
    before, now = (group.family.received(key, factors, model) for model in (old, new))
    others = {e.name: e.stands_for or "" for e in group.table if e.factor is None}
    moves = _moves(set(others.values()), old, new)
    return {
        **{entry.name: (before[entry.name], now[entry.name]) for entry in factors},
        **{name: moves[stands_for] for name, stands_for in others.items()},
    }
