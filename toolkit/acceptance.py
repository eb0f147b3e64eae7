"""What an update must be before it may enter the mean."""

import math
from collections import Counter
from collections.abc import Mapping

import numpy as np

from device_agent.manifest import TensorEntry
from device_agent.update import UpdateRecord, check_tensors
from profiles.errors import UpdateError
from toolkit.parts import check_part, held_shape
from toolkit.submodel import Shapes

MOST_SAMPLES = 10**12
"""More than any device has; keeps weighted sums within float32."""


def check_update(record: UpdateRecord, arrays: Mapping[str, np.ndarray], shapes: Shapes) -> None:
    """Raise UpdateError unless an update, from whoever it comes, fits a global model of `shapes`.

    Looks at the table first, so that nothing is computed from factors of absurd size.
    """
    if not 1 <= record.samples <= MOST_SAMPLES:
        raise UpdateError(
            f"An update of {record.samples} samples has no weight; it has from 1 to "
            f"{MOST_SAMPLES:g}."
        )
    origin = f"The update of {record.submodel!r}"
    _check_names(record.tensors, origin, shapes)
    for name, entries in _by_parameter(record.tensors).items():
        for entry in entries:
            check_part(entry, shapes[name])
        _check_group(name, entries, shapes[name], origin)
    check_tensors(arrays, record.tensors, origin)


def held_shapes(table: tuple[TensorEntry, ...], shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Shape of what a checked table holds of each global tensor that it stands for."""
    return {
        name: held_shape(entries[0], shapes[name]) for name, entries in _by_parameter(table).items()
    }


def _by_parameter(table: tuple[TensorEntry, ...]) -> dict[str, list[TensorEntry]]:
    """The entries that stand for each global tensor, in table order."""
    groups: dict[str, list[TensorEntry]] = {}
    for entry in table:
        groups.setdefault(entry.stands_for or "", []).append(entry)
    return groups


def _check_names(table: tuple[TensorEntry, ...], origin: str, shapes: Shapes) -> None:
    times = Counter(entry.name for entry in table)
    for entry in table:
        if times[entry.name] > 1:
            raise UpdateError(f"{origin} lists the tensor {entry.name!r} more than once.")
        if entry.stands_for is None:
            raise UpdateError(f"{origin}: {entry.name!r} stands for no global parameter.")
        if entry.stands_for not in shapes:
            raise UpdateError(
                f"{origin} trains {entry.stands_for!r}, which the global model does not have: it "
                "belongs to another model."
            )


def _check_group(
    name: str, entries: list[TensorEntry], shape: tuple[int, ...], origin: str
) -> None:
    """Check the entries that stand for the global tensor `name` of `shape`."""
    labels = [entry.factor for entry in entries]
    if len(set(labels)) < len(labels) or (None in labels and len(labels) > 1):
        raise UpdateError(f"{origin} stands for {name!r} twice; one tensor or its factors may.")
    if any(entry.part != entries[0].part for entry in entries):
        raise UpdateError(f"{origin}: the factors of {name!r} name different parts of it.")
    held = held_shape(entries[0], shape)
    if None in labels:
        _check_shape(name, entries[0].shape, held, origin)
    else:
        _check_rank(name, entries, held, origin)


def _check_shape(name: str, came: tuple[int, ...], held: tuple[int, ...], origin: str) -> None:
    if came != held:
        raise UpdateError(
            f"{origin} gives {name!r} the shape {came}; the global model has {held} there."
        )


def _check_rank(name: str, entries: list[TensorEntry], held: tuple[int, ...], origin: str) -> None:
    """Refuse factors that are empty, or larger than any rank of a tensor of shape `held` makes.

    A tensor has at most the rank count / largest size, at which CP factors have that many rows of
    `sum(held)` numbers; a matrix factorization of less than full size is smaller still.
    """
    numbers = sum(math.prod(entry.shape) for entry in entries)
    largest = math.prod(held) // max(held, default=1) * sum(held)
    if not 0 < numbers <= largest:
        raise UpdateError(
            f"{origin} has factors of {numbers} numbers for {name!r}; factors of a tensor of "
            f"shape {held} have from 1 to {largest}."
        )
