"""Segments of a forward pass that run again when the backward pass reaches them.

The forward pass is cut into segments, as in Chen et al., "Training deep nets with sublinear memory
cost" (2016, https://arxiv.org/abs/1604.06174). The values that cross a cut are its checkpoints,
from which the segment behind it runs again. What lies behind the last cut runs once.
"""

from collections import deque
from functools import cached_property
from itertools import accumulate

from exporters.memory.liveness import reads
from exporters.onnx.recomputed.forward_pass import ForwardPass

PARTS = 32
"""Budgets are such parts of the memory of everything that the backward pass reads."""

Cuts = tuple[int, ...]
"""Ascending places in the forward pass: a cut at place n is before the node n."""


class Segments:
    """Ways to cut `forward`, of which all sizes are known."""

    def __init__(self, forward: ForwardPass) -> None:
        self.forward = forward

    def repeated(self) -> dict[frozenset[str], int]:
        """Names of the values to compute twice, with an estimate of the peak in bytes.

        They follow from cuts for budgets of all sizes, and from the first cuts of each: those at
        the beginning save most, because the largest values of most models are there.
        """
        starts = (cuts[:n] for cuts in self.cuts() for n in range(1, len(cuts) + 1))
        peaks: dict[frozenset[str], int] = {}
        for cuts in dict.fromkeys(starts):
            peaks.setdefault(self.between(cuts), self.estimated(cuts))
        return peaks

    def between(self, cuts: Cuts) -> frozenset[str]:
        """Names of the values to compute twice with these `cuts`."""
        forward, number = self.forward, self.forward.place
        kept = set(forward.always_kept)
        for value in forward.values:
            first, last = number[forward.made_by(value)], forward.last_reader(value)
            if first >= cuts[-1] or any(first < cut <= last for cut in cuts):
                kept.add(value)
        repeated = {value for value in forward.values if forward.read_later(value)} - kept
        for node in reversed(forward.nodes):
            if not repeated.isdisjoint(node.outputs):
                repeated.update(v for v in reads(node) if v in forward.sizes and v not in kept)
        return frozenset(value.name or "" for value in repeated)

    def estimated(self, cuts: Cuts) -> int:
        """The largest number of bytes that are kept for the backward pass, see `cuts`."""
        held = start = most = 0
        for cut in (*cuts, len(self.forward.nodes)):
            most = max(most, held + self.needed[cut] - self.needed[start])
            held, start = held + self.widths[cut], cut
        return most

    def cuts(self) -> list[Cuts]:
        """Different cuts, each for some budget.

        When the backward pass reaches a segment, all checkpoints before it are alive, and all that
        the backward pass needs of it. The cuts for a budget leave this below the budget
        everywhere, with as few bytes of checkpoints as possible.
        """
        ways = (self.within(self.needed[-1] * part / PARTS) for part in range(1, PARTS))
        return list(dict.fromkeys(cuts for cuts in ways if cuts))

    def within(self, budget: float) -> Cuts:
        """The cuts with the fewest bytes of checkpoints in this budget; empty if there are none."""
        held: dict[int, int] = {0: 0}  # bytes of all checkpoints up to a cut; the start counts too
        before: dict[int, int] = {}
        end = len(self.forward.nodes)
        starts = deque([0])  # of segments; the best one that is in the budget is the first
        for cut in (*self.narrow, end):
            # What exceeds the budget here exceeds it behind every later cut, too.
            while starts and held[starts[0]] + self.needed[cut] - self.needed[starts[0]] > budget:
                starts.popleft()
            if not starts:
                return ()
            before[cut] = starts[0]
            held[cut] = held[starts[0]] + self.widths[cut]
            while starts and held[starts[-1]] > held[cut]:
                starts.pop()  # an earlier start with more checkpoints is worse for every later cut
            starts.append(cut)
        cuts, cut = [], before.get(end, 0)
        while cut:
            cuts.append(cut)
            cut = before[cut]
        return tuple(reversed(cuts))

    @cached_property
    def narrow(self) -> list[int]:
        """Places that fewer bytes cross than the places beside them, or as many."""
        numbers = range(1, len(self.forward.nodes))
        widths = self.widths
        return [n for n in numbers if widths[n - 1] >= widths[n] <= widths[n + 1]]

    @cached_property
    def widths(self) -> list[int]:
        """Bytes that nodes from each place on read from nodes before it."""
        change = [0] * (len(self.forward.nodes) + 1)
        for value, size in self.forward.sizes.items():
            first = self.forward.place[self.forward.made_by(value)]
            last = self.forward.last_reader(value)
            if first < last:
                change[first + 1] += size
                change[last + 1] -= size
        return list(accumulate(change))

    @cached_property
    def needed(self) -> list[int]:
        """Bytes made before each place that the backward pass reads, without small values."""
        sizes = [0] * (len(self.forward.nodes) + 1)
        for value, size in self.forward.sizes.items():
            if value not in self.forward.small and self.forward.read_later(value):
                sizes[self.forward.place[self.forward.made_by(value)] + 1] += size
        return list(accumulate(sizes))
