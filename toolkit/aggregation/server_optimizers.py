"""Server optimizers: the server uses the change of a round as a gradient to train the model.

Let w be an element of the model and d the change by which the round's aggregation would move it.
FedAvgM (Hsu et al. 2019) keeps a velocity m:

    m <- b1 m + d,                  w <- w + rate m

FedAdam and FedYogi (Reddi et al. 2021, algorithm 2) also keep a second moment v, at first tau^2:

    m <- b1 m + (1 - b1) d
    v <- b2 v + (1 - b2) d^2                    (FedAdam)
    v <- v - (1 - b2) d^2 sign(v - d^2)         (FedYogi)
    w <- w + rate m / (sqrt(v) + tau)

If the round does not change an element, for example because no update contains it, the element
keeps its value and its moments. Statistics of batch norm take the plain mean, because they are
measured. Kept factors (`cp`) are fitted to the new tensors.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from toolkit.aggregation.aggregation_policy import AggregationPolicy
from toolkit.aggregation.update_validation import is_statistic
from toolkit.submodels.global_model import GlobalModel, Moments


def server_step(
    model: GlobalModel,
    aggregated: Mapping[str, Tensor],
    trained: Collection[str],
    policy: AggregationPolicy,
) -> tuple[dict[str, Tensor], Moments]:
    """Take a step of `policy.server_optimizer` from `model` towards the `aggregated` tensors.

    Args:
        model: The global model before the round, with the moments of earlier rounds. Moments of
            another optimizer are dropped.
        aggregated: The tensors that the round's aggregation gives.
        trained: The names of the tensors that updates list as parameters.
        policy: The optimizer and its settings.

    Returns:
        The new tensors, and the moments for the next round.
    """
    name = policy.server_optimizer
    assert name is not None
    first, second = f"{name}.first", f"{name}.second"
    moments = {key: {**model.moments.get(key, {})} for key in (first, second)}
    tensors = {**aggregated}
    for tensor, value in aggregated.items():
        old = model.tensors[tensor]
        if value is old or tensor not in trained or is_statistic(tensor):
            continue
        change = value.double() - old.double()
        moves = change != 0
        m = _kept(moments[first], tensor, old, 0.0)
        share = 1.0 if name == "fedavgm" else 1 - policy.server_momentum
        m = torch.where(moves, policy.server_momentum * m + share * change, m)
        moments[first][tensor] = m.float()
        step = m
        if name != "fedavgm":
            v = _kept(moments[second], tensor, old, policy.server_tau**2)
            v = torch.where(moves, second_moment(v, change**2, policy), v)
            moments[second][tensor] = v.float()
            step = m / (v.sqrt() + policy.server_tau)
        new = torch.where(moves, old.double() + policy.server_step * step, old.double())
        tensors[tensor] = new.to(old.dtype)
    return tensors, {key: own for key, own in moments.items() if own}


def _kept(moments: Mapping[str, Tensor], name: str, old: Tensor, start: float) -> Tensor:
    """A moment of an earlier round, float64; `start` for a tensor without one."""
    known = moments.get(name)
    if known is None or known.shape != old.shape:
        return torch.full_like(old, start, dtype=torch.float64)
    return known.double()


def second_moment(v: Tensor, square: Tensor, policy: AggregationPolicy) -> Tensor:
    """The second moment after a change whose square is `square`; see the module."""
    rest = 1 - policy.server_beta2
    if policy.server_optimizer == "fedadam":
        return policy.server_beta2 * v + rest * square
    return v - rest * square * torch.sign(v - square)
