"""Finds single values of a forward pass that take much memory but little work to compute again.

Examples are the results of norms, GELU and softmax; see Korthikanti et al., "Reducing activation
recomputation in large transformer models" (2022, https://arxiv.org/abs/2205.05198).
"""

from collections.abc import Collection, Iterator

import onnx_ir as ir

from exporters.memory.liveness import Buffer, reads
from exporters.onnx.recomputed.forward_pass import ForwardPass


def cheapest_first(forward: ForwardPass, peak: Collection[Buffer]) -> Iterator[frozenset[str]]:
    """Yield growing sets of names of values to compute twice.

    Each set contains the previous set, and the values that then save the most memory for their
    work.

    Args:
        forward: The forward pass, whose sizes must all be known.
        peak: The buffers that are alive at the peak of the step. Only the values in these buffers
            are candidates.
    """
    alive = {buffer.name: buffer.size for buffer in peak}
    # Values that the backward pass reads, by the value whose memory they use.
    held: dict[ir.Value, list[ir.Value]] = {}
    for value in forward.values:
        holder = forward.holder(value)
        if holder.name in alive and forward.read_later(value) and value not in forward.always_kept:
            held.setdefault(holder, []).append(value)
    repeated: set[ir.Value] = set()
    while held:
        kept = {value: holder for holder, values in held.items() for value in values}
        ways = {holder: needed_for(forward, holder, kept, repeated) for holder in held}
        works = {holder: work_of(forward, needed) for holder, needed in ways.items()}
        best = min(held, key=lambda holder: works[holder] / alive[holder.name or ""])
        repeated |= ways[best]
        del held[best]
        yield frozenset(value.name or "" for value in repeated)


def needed_for(
    forward: ForwardPass,
    holder: ir.Value,
    kept: dict[ir.Value, ir.Value],
    repeated: Collection[ir.Value],
) -> set[ir.Value]:
    """Return the values to compute again, apart from `repeated`, to free the memory of `holder`.

    `kept` maps each value that stays in memory to the value that owns its memory.
    """
    stack = [value for value, memory in kept.items() if memory is holder]
    needed: set[ir.Value] = set()
    while stack:
        value = stack.pop()
        if value in needed or value in repeated:
            continue
        needed.add(value)
        for source in reads(forward.producer_of(value)):
            again = kept.get(source, holder) is holder and source not in forward.always_kept
            if again and source in forward.sizes:
                stack.append(source)
    return needed


def work_of(forward: ForwardPass, values: Collection[ir.Value]) -> int:
    """The work of computing `values`."""
    return sum(forward.efforts[node] for node in {forward.producer_of(value) for value in values})
