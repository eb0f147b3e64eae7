"""Medians of earlier updates. They limit the updates of the next round.

`update_limits.py` has the rules. This module needs no torch, so that a database can keep a
`Reference` as JSON.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field

import numpy as np
from msgspec import field
from msgspec.structs import replace

from device_agent.formats.manifest import Struct
from device_agent.formats.protocol.fleet import Limited
from toolkit.aggregation.limits.norm_statistics import ENOUGH, central_means

SAMPLES = 2.0
"""The samples of a device count at most up to this multiple of its kind's reference."""
KIND_SAMPLES = 3.0
"""The median of a kind counts at most up to this multiple of the median of all devices."""
STEPS = 3.0
"""The limits of a device rise by the square root of the ratio of its steps to the reference. This
is the largest ratio that counts, because devices could claim any number of steps."""


class Figures(Struct, frozen=True, kw_only=True, eq=False):
    """The figures of one limited update.

    Attributes:
        kind: The submodel.
        samples: The samples that it claims.
        steps: The training steps that it claims.
        changes: The root mean square of the change, by the name of a global tensor. If the family
            trains a personal model, the key is the submodel, `|` and the name.
        weight: The weight of the update.
        share: The share of its change that counts: 1, or less if it is stale.
        statistics: Batch norm's statistics by the name of a global tensor, in the whole tensor's
            shape. Elements that the update does not contain are NaN.
    """

    kind: str
    samples: int
    steps: int
    changes: dict[str, float]
    weight: float = 1.0
    share: float = 1.0
    statistics: dict[str, np.ndarray] = field(default_factory=dict)


class Reference(Struct, frozen=True, kw_only=True):
    """Medians of `Figures` over the rounds.

    After a round, each median becomes the geometric mean of itself and the round's median.

    Attributes:
        steps: Steps of an update.
        kinds: Samples of an update, by submodel.
        changes: As in `Figures`, of an update with at most `steps` steps.
    """

    steps: float = 0.0
    kinds: dict[str, float] = field(default_factory=dict)
    changes: dict[str, float] = field(default_factory=dict)

    def most_samples(self, kind: str) -> int | None:
        """The most samples that count for an update of `kind`; None if no kind is known.

        For an unknown kind, the result follows from the median over the known kinds.
        """
        if not self.kinds:
            return None
        usual = self.kinds.get(kind, lower_median(self.kinds.values()))
        return max(1, round(SAMPLES * usual))

    def allowance(self, steps: int) -> float:
        """The factor by which the limits rise for an update of `steps` steps; at least 1."""
        return math.sqrt(min(max(steps / max(self.steps, 1.0), 1.0), STEPS))

    def change(self, key: str) -> float | None:
        """The usual change of the tensor `key`.

        If this change is unknown, the result is the median over other tensors.
        """
        known = self.changes.get(key, 0.0)
        if known > 0:
            return known
        others = [value for value in self.changes.values() if value > 0]
        return lower_median(others) if others else None

    def completed(self, figures: Sequence[Figures]) -> "Reference":
        """Fill in missing medians from `figures`: this round's updates before they are limited."""
        if not figures:
            return self
        own = _medians(figures, self.steps)
        return Reference(
            steps=self.steps or own.steps,
            kinds={**own.kinds, **self.kinds},
            changes={**own.changes, **self.changes},
        )

    def after(self, figures: Sequence[Figures]) -> "Reference":
        """The reference for the next round, after a round with these figures."""
        if not figures:
            return self
        own = _medians(figures, self.steps)
        return Reference(
            steps=_middle(self.steps, own.steps),
            kinds=_moved(self.kinds, own.kinds),
            changes=_moved(self.changes, own.changes),
        )


@dataclass
class RoundLimits:
    """The limits of one round's updates, and what the limits changed.

    Attributes:
        reference: The reference of earlier rounds. `completed` adds kinds that are unknown.
        figures: The figures of each update so far, for `Reference.after`.
        limited: What the limits changed in each update; None for an update within its limits.
    """

    reference: Reference
    figures: list[Figures] = dataclass_field(default_factory=list)
    limited: list[Limited | None] = dataclass_field(default_factory=list)

    def note(self, figures: Figures, limited: Limited | None) -> None:
        """Add an update."""
        self.figures.append(figures)
        self.limited.append(limited)

    def statistics(self, received: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """The means of the batch norm statistics for which values in updates were limited.

        Call it once, after the last update. It notes which statistics were limited.

        Args:
            received: The global model's statistics.

        Returns:
            As `CentralMeans.means`.
        """
        central = central_means(
            [own.statistics for own in self.figures],
            [own.weight for own in self.figures],
            [own.share for own in self.figures],
            received,
        )
        pairs = zip(self.limited, central.times, strict=True)
        self.limited = [with_tensors(limited, times) for limited, times in pairs]
        return central.means


def with_tensors(limited: Limited | None, times: Mapping[str, float]) -> Limited | None:
    """`limited` with the tensors of `times`. Their sizes exceeded their limits by these factors."""
    if not times:
        return limited
    known = limited or Limited()
    tensor = max(times, key=lambda key: times[key])
    tensors = known.tensors + len(times)
    if known.tensors and known.times >= times[tensor]:
        return dataclasses.replace(known, tensors=tensors)
    return dataclasses.replace(known, tensors=tensors, times=times[tensor], tensor=tensor)


def lower_median(values: Iterable[float]) -> float:
    """The middle value, or the lower one of two. Half of the devices cannot raise this value."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def _medians(figures: Sequence[Figures], steps: float) -> Reference:
    """The medians of `figures`. Changes are divided by the allowance for more than `steps` steps.

    If `steps` is 0, the median of these updates takes its place.
    """
    own = Reference(steps=lower_median(f.steps for f in figures))
    divisor = replace(own, steps=steps) if steps else own
    changes: dict[str, list[float]] = {}
    for one in figures:
        more = divisor.allowance(one.steps)
        for key, value in one.changes.items():
            changes.setdefault(key, []).append(value / more)
    return replace(
        own,
        kinds=_samples_by_kind(figures),
        changes={key: _usual(values) for key, values in changes.items()},
    )


def _usual(changes: Sequence[float]) -> float:
    """The reference of a tensor's changes.

    With only two devices, it is unknown which of them is right.
    """
    if len(changes) == 2:
        return _middle(*changes)
    return lower_median(changes)


def _samples_by_kind(figures: Sequence[Figures]) -> dict[str, float]:
    by_kind: dict[str, list[float]] = {}
    for one in figures:
        by_kind.setdefault(one.kind, []).append(one.samples)
    every = lower_median(one.samples for one in figures)
    return {
        kind: min(lower_median(own), KIND_SAMPLES * every) if len(own) >= ENOUGH else every
        for kind, own in by_kind.items()
    }


def _moved(old: Mapping[str, float], new: Mapping[str, float]) -> dict[str, float]:
    moved = {key: _middle(old.get(key, 0.0), value) for key, value in new.items()}
    return {**old, **moved}


def _middle(old: float, new: float) -> float:
    """The geometric mean of two figures. If one figure is 0, the result is the other figure."""
    return math.sqrt(old) * math.sqrt(new) if old > 0 and new > 0 else max(old, new)
