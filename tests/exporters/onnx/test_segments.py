"""Cuts of a forward pass, against all cuts that there are."""

from itertools import accumulate, chain, combinations
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from exporters.onnx.recomputed.segments import Segments

SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=8)


@given(made=SIZES, crossing=st.lists(st.integers(0, 9), min_size=8, max_size=8), budget=SIZES)
def test_cuts_have_the_fewest_bytes_of_checkpoints_in_a_budget(
    made: list[int], crossing: list[int], budget: list[int]
) -> None:
    """`made`: what the backward pass needs of each node. `crossing`: what crosses each place."""
    count, limit = len(made), sum(budget)
    segments = Segments(cast(Any, SimpleNamespace(nodes=made)))
    needed, widths = [0, *accumulate(made)], [0, *crossing]
    segments.__dict__.update(needed=needed, widths=widths, narrow=list(range(1, count)))

    def held(cuts: tuple[int, ...]) -> int:
        return sum(widths[cut] for cut in cuts)

    def fits(cuts: tuple[int, ...]) -> bool:
        ends = zip((0, *cuts), (*cuts, count), strict=True)
        return all(
            held(cuts[:n]) + needed[end] - needed[start] <= limit
            for n, (start, end) in enumerate(ends)
        )

    every = chain.from_iterable(combinations(range(1, count), n) for n in range(count))
    possible = [cuts for cuts in every if fits(cuts)]
    cuts_within = segments.within(limit)
    if possible:
        assert fits(cuts_within)
        assert held(cuts_within) == min(map(held, possible))
    else:
        assert cuts_within == ()
