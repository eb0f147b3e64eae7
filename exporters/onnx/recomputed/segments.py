"""Segments of a forward pass that run again when the backward pass reaches them.

The forward pass is cut into segments, as in Chen et al., "Training deep nets with sublinear memory
cost" (2016, https://arxiv.org/abs/1604.06174). The checkpoints of a cut are the values that are
computed before the cut and read after it. From these values, the segment after the cut is computed
again. Only the segment after the last cut is not computed again.
"""

from collections import deque
from functools import cached_property
from itertools import accumulate

from exporters.memory.liveness import reads
from exporters.onnx.recomputed.forward_pass import ForwardPass

PARTS = 32
"""Budgets are n / PARTS of the size of all values that the backward pass reads, for n from 1."""

Cuts = tuple[int, ...]
"""Numbers of nodes of the forward pass, ascending: the cut n is before the node n."""


class Segments:
    """Ways to cut the forward pass `forward`, whose sizes must all be known."""

    def __init__(self, forward: ForwardPass) -> None:
        self.forward = forward

    def repeated(self) -> dict[frozenset[str], int]:
        """Return sets of values to compute twice (by name), each with its estimated peak in bytes.

        There is a list of cuts for each memory budget. For every n, the first n cuts of a list give
        one set. The first cuts save the most memory, because most models have their largest values
        at the beginning.
        """
        starts = (cuts[:n] for cuts in self.cuts() for n in range(1, len(cuts) + 1))
        peaks: dict[frozenset[str], int] = {}
        for cuts in dict.fromkeys(starts):
            peaks.setdefault(self.between(cuts), self.estimated(cuts))
        return peaks

    def between(self, cuts: Cuts) -> frozenset[str]:
        """Return the names of the values to compute twice if the forward pass is cut at `cuts`."""
        forward, number = self.forward, self.forward.position
        kept = set(forward.always_kept)
        for value in forward.values:
            first, last = number[forward.producer_of(value)], forward.last_reader(value)
            if first >= cuts[-1] or any(first < cut <= last for cut in cuts):
                kept.add(value)
        repeated = {value for value in forward.values if forward.read_later(value)} - kept
        for node in reversed(forward.nodes):
            if not repeated.isdisjoint(node.outputs):
                repeated.update(v for v in reads(node) if v in forward.sizes and v not in kept)
        return frozenset(value.name or "" for value in repeated)

    def estimated(self, cuts: Cuts) -> int:
        """Return the most bytes that `cuts` keep at one time for the backward pass."""
        held = start = most = 0
        for cut in (*cuts, len(self.forward.nodes)):
            most = max(most, held + self.needed[cut] - self.needed[start])
            held, start = held + self.widths[cut], cut
        return most

    def cuts(self) -> list[Cuts]:
        """The cuts for each memory budget, without duplicates.

        When the backward pass reaches a segment, two kinds of values are alive: the checkpoints of
        all cuts before the segment, and the values of the segment that the backward pass reads.
        Cuts fit into the budget if the total size of these values is within the budget. Of all cuts
        that fit, the cuts with the fewest bytes of checkpoints are chosen.
        """
        ways = (self.within(self.needed[-1] * part / PARTS) for part in range(1, PARTS))
        return list(dict.fromkeys(cuts for cuts in ways if cuts))

    def within(self, budget: float) -> Cuts:
        """Return the cuts that fit into `budget` with the fewest bytes of checkpoints.

        Returns an empty tuple if no cuts fit.
        """
        held: dict[int, int] = {0: 0}  # bytes of checkpoints up to each cut; 0 is the start
        before: dict[int, int] = {}
        end = len(self.forward.nodes)
        starts = deque([0])  # of segments within the budget; the first has the fewest checkpoints
        for cut in (*self.narrow, end):
            # A segment that exceeds the budget here exceeds it at every later cut, too.
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
        """The cuts with checkpoints that are at most as large as at both neighbouring cuts."""
        numbers = range(1, len(self.forward.nodes))
        widths = self.widths
        return [n for n in numbers if widths[n - 1] >= widths[n] <= widths[n + 1]]

    @cached_property
    def widths(self) -> list[int]:
        """For each n, the bytes that node n and later nodes read from nodes before n."""
        change = [0] * (len(self.forward.nodes) + 1)
        for value, size in self.forward.sizes.items():
            first = self.forward.position[self.forward.producer_of(value)]
            last = self.forward.last_reader(value)
            if first < last:
                change[first + 1] += size
                change[last + 1] -= size
        return list(accumulate(change))

    @cached_property
    def needed(self) -> list[int]:
        """For each n, the bytes of values from nodes before n that the backward pass reads.

        Small values do not count.
        """
        sizes = [0] * (len(self.forward.nodes) + 1)
        for value, size in self.forward.sizes.items():
            if value not in self.forward.small and self.forward.read_later(value):
                sizes[self.forward.position[self.forward.producer_of(value)] + 1] += size
        return list(accumulate(sizes))
