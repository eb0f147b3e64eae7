"""Clips the change of each update, so that no device moves a round's sum by more than `clip`."""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from device_agent.formats.update import UpdateRecord
from profiles.errors import InputError
from toolkit.aggregation.limits.update_limits import changes
from toolkit.aggregation.recover import Received, as_tensors
from toolkit.aggregation.running_aggregation import Aggregation
from toolkit.submodels.submodel import Submodel
from toolkit.submodels.tensor_slices import slices_by_tensor

ROUNDING = 1e-6
"""A clipped change is shorter than `clip` by this share, because its numbers are rounded to
float32."""


def add_clipped(aggregation: Aggregation, update: Received, clip: float) -> float:
    """Add the clipped change of `update` to `aggregation`, with the weight 1.

    The change is v - r for each tensor v of the update. r is the tensor that the device received.
    Factors are composed first. After clipping, the L2 norm of the change is at most `clip`. Rows of
    classes that the device does not have count as unchanged: the sum does not tell which classes a
    device has.

    The sums of `aggregation` are then sums of changes, for `noised_model`; `Aggregation.result`
    cannot use them.

    Args:
        aggregation: The sums so far.
        update: `check_update` has accepted it. It was trained from the model of `aggregation`.
        clip: The bound of the L2 norm.

    Returns:
        The norm before clipping.
    """
    record = update[0]
    policy = replace(aggregation.policy, factors="act")
    names = {entry.name: entry.stands_for or "" for entry in record.tensors}
    moved: dict[str, Tensor] = {}
    squares = 0.0
    for change in changes(update, aggregation.model, policy):
        value = torch.from_numpy(change.new.astype(np.float64) - change.old)
        if change.rows is not None:
            others = torch.ones(len(value), dtype=torch.bool)
            others[list(change.rows)] = False
            value[others] = 0.0
        moved[change.name if change.factors else names[change.name]] = value
        squares += float(value.square().sum())
    norm = math.sqrt(squares)
    scale = clip / norm * (1 - ROUNDING) if norm > clip else 1.0
    _add(aggregation, record, {name: value * scale for name, value in moved.items()})
    return norm


def add_changes(aggregation: Aggregation, group: Received) -> None:
    """Add the sum of the clipped changes of a group of devices; see `add_clipped`.

    Args:
        aggregation: The sums so far.
        group: The record of the group, without factors, and the sum of the changes.
    """
    record, arrays = group
    values = as_tensors(arrays)
    moved = {entry.stands_for or "": values[entry.name] for entry in record.tensors}
    _add(aggregation, record, moved)


def _add(aggregation: Aggregation, record: UpdateRecord, moved: Mapping[str, Tensor]) -> None:
    places = slices_by_tensor(record.tensors, aggregation.shapes)
    for name, value in moved.items():
        aggregation.mean.add({name: value.float()}, 1.0, places)
    aggregation.trained |= moved.keys()
    aggregation.updates += 1


def refuse_statistics(submodel: Submodel) -> None:
    """Raise InputError if updates of `submodel` contain other tensors than parameters.

    Running statistics are as large as activations, so they would use up the norm of a change.
    """
    for entry in submodel.program.tensors:
        if entry.role == "buffer":
            raise InputError(
                "Updates of {submodel} contain {tensor!r}, which is not a parameter. With "
                "differential privacy only parameters are averaged. For batch norms, set "
                'batch_norm = "static" in [training]; or use a model without running statistics.',
                code="privacy.statistics",
                submodel=str(submodel.spec),
                tensor=entry.stands_for,
            )
