"""Rounds of mixed families by hand, with what each device received, for tests of rules."""

import math

import numpy as np
import torch

from toolkit.aggregation.aggregate import Received
from toolkit.submodels.global_model import GlobalModel
from updates import (
    NARROW,
    OLD,
    PARAMETERS,
    RANK,
    Array,
    composed,
    cp_update,
    dense_of,
    full_update,
    low_rank_update,
    narrow_update,
    numbers,
    slice_update,
)

FACTORS = {e.name: numbers(e.shape, 70 + n) for n, e in enumerate(cp_update(0)[0].tensors)}
MODEL = GlobalModel(OLD.tensors, {"cp:2.0": {n: torch.from_numpy(v) for n, v in FACTORS.items()}})
MAKERS = (full_update, low_rank_update, cp_update, slice_update, narrow_update)


def truncated(weight: Array) -> Array:
    """The best convolution of RANK as (n, m, h, w), by numpy's SVD of ((m, h), (n, w))."""
    n, m, h, w = weight.shape
    u, s, v = np.linalg.svd(weight.transpose(1, 2, 0, 3).reshape(m * h, n * w))
    low = (u[:, :RANK] * s[:RANK]) @ v[:RANK]
    return np.asarray(low.reshape(m, h, n, w).transpose(2, 0, 1, 3))


def received(update: Received) -> dict[str, Array]:
    """What the device received of the global tensors, float64."""
    old = {name: value.double().numpy() for name, value in OLD.tensors.items()}
    match update[0].submodel.partition(":")[0]:
        case "cp":
            return composed({name: value.astype(np.float64) for name, value in FACTORS.items()})
        case "low-rank":
            return {**old, "c": truncated(old["c"])}
    return old


def masked(update: Received) -> dict[str, Array]:
    """What the update says of the global tensors, float64, NaN for what it does not hold."""
    if update[0].submodel.startswith("width"):
        c = np.full(PARAMETERS["c"], math.nan)
        c[NARROW] = update[1]["c"]
        return {"c": c}
    return dense_of(update)


def drawn_fleet(draw: np.random.Generator, count: int) -> list[Received]:
    """Updates of mixed families, close to what their devices received."""
    fleet = []
    for number in range(count):
        maker = MAKERS[0] if number == 0 else MAKERS[int(draw.integers(len(MAKERS)))]
        fleet.append(maker(int(draw.integers(2**30)), samples=int(draw.integers(1, 10**6))))
    return fleet
