"""Limits what one update can do to the global model, before it is aggregated.

Let v be a tensor of an update and r the tensor that its device received. For factors that are
averaged as factors (`cp`), v and r are factors. For other factors (`low-rank`), v and r are
products of factors: r is the truncated tensor, not the global tensor. Training has changed the
tensor by v - r. The limits follow from a `Reference`, the medians of earlier rounds:

    samples     at most SAMPLES times the reference of the kind
    v           r + min(1, CHANGE m a / rms(v - r)) (v - r), with the reference m of the tensor, and
                a = sqrt(steps / reference of steps), between 1 and sqrt(STEPS)

Statistics of batch norm are limited after the last update; see `norm_statistics.py`.

An update within its limits stays the same, bit for bit. So updates can be added one by one, and the
limits work with every rule of aggregation. The first round of a kind has no earlier figures; it
takes the medians of its own updates.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace
from torch import Tensor

from device_agent.formats.manifest import TensorEntry
from device_agent.formats.protocol.fleet import Limited
from device_agent.formats.update import UpdateRecord
from toolkit.aggregation.aggregation_policy import AggregationPolicy
from toolkit.aggregation.limits.norm_statistics import variance_beside
from toolkit.aggregation.limits.reference import Figures, Reference, RoundLimits, with_tensors
from toolkit.aggregation.recover import Received, as_tensors, weight_of
from toolkit.aggregation.update_validation import is_statistic
from toolkit.families import recovering_family
from toolkit.submodels.family import Family
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.matrix_product import Product
from toolkit.submodels.spec import parse_spec
from toolkit.submodels.submodel import Shapes, shapes_of
from toolkit.submodels.tensor_slices import (
    TensorSlice,
    group_by_global_tensor,
    slice_of,
    slice_shapes,
    take_slice,
)

CHANGE = 2.0
"""The change of a tensor is at most this many times its reference."""
LEAST = 1e-3
"""A change below this share of the tensor's root mean square is never limited, because it may be
only the rounding of the exchanged numbers."""
HUGE = 1e20
"""If the size of a change is smaller, none of its numbers overflows float32."""
PIECE = 1 << 13
"""How many numbers are compared at a time. BLAS divides a dot product of 10,000 numbers or more
between threads. Then the result would depend on the number of threads."""


@dataclass
class Change:
    """The change of one tensor by an update.

    Attributes:
        key: The key of its reference.
        name: The tensor's name in the update. With `factors`, the name of the global tensor.
        new: The value in the update, float32.
        old: The value that the device received, in the same shape.
        rows: The rows of classes that the device has; None for all rows.
        tensor: The name of the global tensor.
        part: The slice of the global tensor that `new` has; None for the whole tensor, or for a
            factor.
        factors: The factors that compose `new`, if the limited value replaces them.
    """

    key: str
    name: str
    new: np.ndarray
    old: np.ndarray
    rows: tuple[int, ...] | None = None
    tensor: str = ""
    part: TensorSlice | None = None
    factors: Sequence[TensorEntry] = ()

    def size(self) -> float:
        """The root mean square of the change, over the rows of the device's classes."""
        new, old = self.new, self.old
        if self.rows is not None:
            new, old = new[list(self.rows)], old[list(self.rows)]
        return _distance(new, old)

    def limit(self, reference: Reference, steps: int) -> float:
        """The largest allowed size; infinite if there is no reference."""
        usual = reference.change(self.key)
        return math.inf if usual is None else CHANGE * usual * reference.allowance(steps)

    def bound(self, size: float, reference: Reference, steps: int) -> float:
        """The largest size that a change of this `size` may keep.

        Harmless changes are not limited.
        """
        limit = self.limit(reference, steps)
        return limit if size <= limit else max(limit, LEAST * _distance(self.old))

    def share_within(self, reference: Reference, steps: int) -> float:
        """The share of the change that counts within the limits of `reference`: 1, or less."""
        size = self.size()
        bound = self.bound(size, reference, steps)
        return 1.0 if size <= bound else bound / size

    def within(self, limit: float, size: float) -> np.ndarray:
        """The value in the update, moved towards the received value until its size is `limit`."""
        if size > HUGE:
            old = self.old.astype(np.float64)
            return (old + limit / size * (self.new - old)).astype(np.float32)
        value: np.ndarray = np.subtract(self.new, self.old, dtype=np.float32)
        value *= np.float32(limit / size)
        value += self.old
        return value


def figures(update: Received, model: GlobalModel, policy: AggregationPolicy) -> Figures:
    """The figures of an update before it is limited, for a kind without a reference.

    `check_update` has accepted the update, which was trained from `model`.
    """
    sizes = {change.key: change.size() for change in changes(update, model, policy)}
    return _figures(update, sizes, model, policy)


def within_limits(
    updates: Iterable[Received],
    limits: RoundLimits | None,
    model: GlobalModel,
    policy: AggregationPolicy,
    share: float = 1.0,
) -> Iterator[Received]:
    """Yield `updates`, each within `limits` if there are any; see `limited_update`.

    `share` is the share of their changes that counts, as in `Figures`.
    """
    for update in updates:
        yield update if limits is None else limited_update(update, limits, model, policy, share)
        del update  # otherwise two updates are in memory while the next one is read


def limited_update(
    update: Received,
    limits: RoundLimits,
    model: GlobalModel,
    policy: AggregationPolicy,
    share: float = 1.0,
) -> Received:
    """Return `update` within `limits`, and record in `limits` what changed.

    `check_update` has accepted the update, which was trained from `model`. `share` is the share of
    its change that counts, as in `Figures`.
    """
    record, arrays = update
    times: dict[str, float] = {}
    sizes: dict[str, float] = {}
    for change in changes(update, model, policy):
        size = change.size()
        bound = change.bound(size, limits.reference, record.steps)
        if size > bound:
            record, arrays = _replaced(record, arrays, change, change.within(bound, size))
            times[change.key] = size / bound
        sizes[change.key] = min(size, bound)
    told, most = None, limits.reference.most_samples(record.submodel)
    if policy.weights == "samples" and most is not None and record.samples > most:
        told = Limited(samples=record.samples, counted=most)
        record = replace(record, samples=most)
    limited = record, arrays
    own = replace(_figures(limited, sizes, model, policy), share=share)
    limits.note(own, with_tensors(told, times))
    return limited


def changes(update: Received, model: GlobalModel, policy: AggregationPolicy) -> Iterator[Change]:
    """Yield the change of each tensor by an update, except batch norm's statistics.

    `check_update` has accepted the update.
    """
    record, arrays = update
    spec = parse_spec(record.submodel)
    family = recovering_family(spec)
    keeps = family.averages_factors and policy.factors == "afm"
    prefix = f"{spec.head}|" if family.trains_personal_model else ""
    every = [entry for entry in record.tensors if entry.factor is not None]
    received = family.received(spec.head, every, model) if every else {}
    sent, shapes = as_tensors(arrays), shapes_of(model.tensors)
    for name, entries in group_by_global_tensor(record.tensors).items():
        if _is_compared(name, model):
            continue
        part = slice_of(entries[0], shapes[name])
        if entries[0].factor is None:
            (entry,) = entries
            rows = record.classes if entry.by_class else None
            old = _part(model.tensors[name], part)
            new = np.asarray(arrays[entry.name])
            yield Change(prefix + name, entry.name, new, old, rows, name, part)
        elif keeps:
            for entry in entries:
                rows = record.classes if entry.by_class else None
                old = _fitting(received.get(entry.name), entry)
                new = np.asarray(arrays[entry.name])
                yield Change(prefix + entry.name, entry.name, new, old, rows, name)
        else:
            new = _composed(family, name, sent, entries, shapes).numpy()
            own = _part(_composed(family, name, received, entries, shapes), part)
            yield Change(prefix + name, name, new, own, None, name, part, entries)


def _composed(
    family: Family,
    name: str,
    tensors: Mapping[str, Tensor],
    entries: Sequence[TensorEntry],
    shapes: Shapes,
) -> Tensor:
    """The tensor that the factors compose: the global tensor `name`, or the update's part of it.

    `shapes` has the shapes of the global tensors.
    """
    value = family.recover(tensors, entries, slice_shapes(entries, shapes))[name]
    return (value.dense() if isinstance(value, Product) else value).detach().float()


def _is_compared(name: str, model: GlobalModel) -> bool:
    """Whether the global tensor `name` is a statistic of batch norm, which has no limit here."""
    return is_statistic(name) and variance_beside(name) in model.tensors


def _statistics(update: Received, model: GlobalModel) -> dict[str, np.ndarray]:
    """The statistics of an update, as `Figures` has them."""
    record, arrays = update
    found = {}
    for entry in record.tensors:
        name = entry.stands_for or ""
        if _is_compared(name, model):
            shape = tuple(model.tensors[name].shape)
            part, value = slice_of(entry, shape), np.asarray(arrays[entry.name], np.float32)
            if part is None:
                found[name] = value
            else:
                found[name] = np.full(shape, np.nan, np.float32)
                found[name][part.index] = value
    return found


def _part(tensor: Tensor, part: TensorSlice | None) -> np.ndarray:
    """The elements of `tensor` in `part`, float32."""
    own = tensor if part is None else take_slice(tensor, part.ranges)
    value: np.ndarray = own.detach().float().numpy()
    return value


def _replaced(
    record: UpdateRecord, arrays: Mapping[str, np.ndarray], change: Change, value: np.ndarray
) -> Received:
    """The update with `value` in place of the change's tensor, or of the factors that make it."""
    if not change.factors:
        return record, {**arrays, change.name: value}
    first, gone = change.factors[0], {entry.name for entry in change.factors}
    by_class = any(entry.by_class for entry in change.factors)
    dense = replace(first, name=change.name, factor=None, shape=value.shape, by_class=by_class)
    table = tuple(
        dense if e == first else e for e in record.tensors if e == first or e.name not in gone
    )
    left = {name: array for name, array in arrays.items() if name not in gone}
    return replace(record, tensors=table), {**left, change.name: value}


def _figures(
    update: Received, sizes: dict[str, float], model: GlobalModel, policy: AggregationPolicy
) -> Figures:
    record = update[0]
    return Figures(
        kind=record.submodel,
        samples=record.samples,
        steps=record.steps,
        changes=sizes,
        weight=weight_of(record, model, policy),
        statistics=_statistics(update, model) if policy.rule == "mean" else {},
    )


def _fitting(received: Tensor | None, entry: TensorEntry) -> np.ndarray:
    """The received factor; zeros if the device received no factor of this shape."""
    if received is None or tuple(received.shape) != entry.shape:
        return np.zeros(entry.shape, np.float32)
    return received.detach().float().numpy()


def _distance(new: np.ndarray, old: np.ndarray | None = None) -> float:
    """The root mean square of new - old, or of `new` alone, without overflow."""
    a, b = new.reshape(-1), None if old is None else old.reshape(-1)
    total, room = 0.0, np.empty(PIECE, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, a.size, PIECE):
            change = a[start : start + PIECE]
            if b is not None:
                change = np.subtract(change, b[start : start + PIECE], out=room[: change.size])
            total += float(np.dot(change, change))
    if not math.isfinite(total):
        total = float(np.square(a.astype(np.float64) - (0.0 if b is None else b)).sum())
    return math.sqrt(total / a.size) if a.size else 0.0
