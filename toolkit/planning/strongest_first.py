"""The search for the strongest submodel that fits: from the strongest candidate down.

An export takes seconds to a minute, so the search exports only candidates that may be chosen. The
search knows each candidate at one of three depths:

- listed: the spec bounds the strength from above.
- estimated: the strength is exact, and the needs have lower bounds.
- computed: all figures are exact; they come from exported graphs.

The search takes the best candidate by these figures and brings it to the next depth. The search
leaves a candidate out as soon as its figures exceed a budget. It chooses the first computed
candidate that fits: figures only become worse from depth to depth, so no other candidate can be
better. If all candidates were computed, `submodel_choice.plan` would choose the same candidate.
"""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum

from msgspec.structs import replace

from profiles.cost_model.submodel_choice import (
    Budgets,
    Candidate,
    Excess,
    Figure,
    Row,
    excess_ratio,
    excesses,
    preference,
)
from toolkit.planning.recomputed_variants import SUFFIX, decides, is_excluded_by_memory_alone


class Depth(IntEnum):
    """How much is known about a candidate; see the module."""

    LISTED = 0
    ESTIMATED = 1
    COMPUTED = 2


@dataclass(frozen=True)
class Entry:
    """The knowledge of the search about one submodel.

    Attributes:
        spec: The submodel.
        depth: How much is known about the submodel: see `Depth`.
        candidate: The submodel's figures. Unknown needs are 0.
        recomputes: Whether the entry is the variant of another candidate with `recompute=yes`.
        activations: Bytes of activations that a step possibly does not keep. The estimated memory
            leaves them out.
    """

    spec: str
    depth: Depth
    candidate: Candidate
    recomputes: bool = False
    activations: int = 0

    @property
    def order(self) -> tuple[object, ...]:
        """The sort key that puts the best entry first.

        Among equally strong entries, variants come last, because a plain entry that fits is enough.
        """
        strength, *others = preference(self.candidate)
        return (strength, self.recomputes, *others, self.spec)


Look = Callable[[Entry], Entry | None]
"""Looks at an entry one step deeper; None if the submodel turns out to be impossible."""


@dataclass(frozen=True)
class Searched:
    """The end of a search.

    Attributes:
        chosen: The best entry that fits; None if nothing fits.
        excluded: The entries that exceed a budget, by their figures at some depth.
        waiting: The entries that were not needed, best first.
    """

    chosen: Entry | None
    excluded: tuple[Entry, ...]
    waiting: tuple[Entry, ...]


def search(listed: Iterable[Entry], look: Look, budgets: Budgets) -> Searched:
    """Find the best of the entries `listed` that fits all `budgets`.

    If only memory excludes a computed candidate, its variant with `recompute=yes` is tried before
    weaker candidates. But candidates of equal strength without the option are tried first.
    """
    waiting = [(entry.order, entry) for entry in listed]
    specs = {entry.spec for _, entry in waiting}
    heapq.heapify(waiting)
    excluded: list[Entry] = []
    while waiting:
        entry = heapq.heappop(waiting)[1]
        over = excesses(entry.candidate, budgets)
        if over:
            excluded.append(entry)
            variant = variant_of(entry, over)
            if variant is not None and variant.spec not in specs:
                heapq.heappush(waiting, (variant.order, variant))
        elif entry.depth is Depth.COMPUTED:
            rest = (entry for _, entry in sorted(waiting) if not entry.recomputes)
            return Searched(entry, tuple(excluded), tuple(rest))
        elif (deeper := look(entry)) is not None:
            heapq.heappush(waiting, (deeper.order, deeper))
    return Searched(None, nearest_computed(excluded, look, budgets), ())


def variant_of(entry: Entry, over: tuple[Excess, ...]) -> Entry | None:
    """The variant of `entry` that computes activations again; None if that cannot be enough to fit.

    `over` are the budgets that `entry` exceeds. The variant has the strength of `entry`.
    """
    row = Row(candidate=entry.candidate, excesses=over)
    if entry.depth is not Depth.COMPUTED or entry.recomputes or decides(entry.candidate.submodel):
        return None
    if not is_excluded_by_memory_alone(row):
        return None
    spec = entry.candidate.submodel + SUFFIX
    return Entry(spec, Depth.ESTIMATED, unknown(spec, entry.candidate.strength), recomputes=True)


def unknown(submodel: str, strength: float) -> Candidate:
    """A candidate for which only an upper bound of its strength is known."""
    nothing = Figure(0.0, 0.0)
    return Candidate(submodel=submodel, strength=strength, memory=nothing, step=nothing, traffic=0)


def nearest_computed(excluded: list[Entry], look: Look, budgets: Budgets) -> tuple[Entry, ...]:
    """Compute the entry of `excluded` that probably exceeds the budgets least.

    Use it if nothing fits: a message can then name the budgets that this entry needs. The result
    begins with this entry. The other entries follow, without entries that proved impossible. For
    the comparison, all activations count as memory, although a step can keep fewer.
    """

    def distance(entry: Entry) -> float:
        likely = replace(
            entry.candidate,
            memory=Figure(0.0, entry.candidate.memory.upper + entry.activations),
        )
        return excess_ratio(excesses(likely, budgets)[0])

    left = sorted(excluded, key=distance)
    while left and left[0].depth is not Depth.COMPUTED:
        deeper = look(left[0])
        left = left[1:] if deeper is None else [deeper, *left[1:]]
    return tuple(left)
