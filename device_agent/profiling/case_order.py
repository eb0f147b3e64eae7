"""Orders the cases of a calibration so that a slow device can stop early."""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from device_agent.profiling.calibration_cases import Case, Shape

T = TypeVar("T")
FIRST_CASES = 3
"""Number of cases of each graph that are timed even on the slowest device."""


@dataclass(frozen=True)
class Chunk:
    """Cases of one graph that run in one session. If `needed` is set, they are never left out."""

    graph: str
    cases: list[Mapping[str, Shape]]
    needed: bool


def spread(cases: Iterable[Case]) -> list[Chunk]:
    """Order the cases so that the first cases already cover all graphs and sizes well.

    The first chunk of each graph has the graph's smallest, largest and middle case. Each later
    chunk has twice as many cases as the previous chunk. Their sizes are between the earlier sizes.
    """
    graphs: dict[str, list[Mapping[str, Shape]]] = {}
    for name, shapes in cases:
        graphs.setdefault(name, []).append(shapes)
    own = {name: _bisected(sorted(shapes_of, key=_numbers)) for name, shapes_of in graphs.items()}
    chunks, size, needed = list[Chunk](), FIRST_CASES, True
    while own:
        chunks += [Chunk(name, shapes_of[:size], needed) for name, shapes_of in own.items()]
        own = {name: shapes_of[size:] for name, shapes_of in own.items() if shapes_of[size:]}
        size, needed = 2 * size, False
    return chunks


def _numbers(shapes: Mapping[str, Shape]) -> int:
    """Estimate the work of a case: the product of the sizes of all inputs."""
    return math.prod(math.prod(shape) for shape in shapes.values())


def _bisected(items: list[T]) -> list[T]:
    """Order `items`: first, last and middle item, then the middle items of both halves, etc."""
    order, spans = [0, len(items) - 1], deque([(0, len(items) - 1)])
    while spans:
        first, last = spans.popleft()
        middle = (first + last) // 2
        order.append(middle)
        if last - first > 1:
            spans += [(first, middle), (middle, last)]
    return [items[index] for index in dict.fromkeys(order)]
