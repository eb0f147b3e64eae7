"""Draws random samples in the range that a recorded graph or its port gives."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from device_agent.formats.input_range import InputRange, Interval, draw_samples, repeated
from device_agent.formats.manifest import Part
from exporters.programs.recorded_graph import input_node

RANGE, PARTS = "input_range", "parts"
"""Keys in the `meta` of a graph's input."""


def range_of_input(graph: GraphModule) -> InputRange:
    """The range of the numbers that `graph` takes. Empty if they are standard normal."""
    known: InputRange = input_node(graph).meta.get(RANGE, ())
    return known


def parts_of_input(graph: GraphModule) -> tuple[Part, ...]:
    """The inputs that are packed into the samples that `graph` takes; empty for one array."""
    known: tuple[Part, ...] = input_node(graph).meta.get(PARTS, ())
    return known


def describe_input(graph: GraphModule, input_range: InputRange, parts: tuple[Part, ...]) -> None:
    """Store in `graph` the range of its samples, and the inputs that are packed into a sample."""
    meta = input_node(graph).meta
    meta |= {key: value for key, value in ((RANGE, input_range), (PARTS, parts)) if value}


def range_of_row(sources: list[tuple[Node, int]]) -> InputRange:
    """The range of a row of values. Numbers that come from samples keep their intervals.

    Args:
        sources: The nodes whose values make the row, each with its count of numbers in the row.
    """
    if not any(RANGE in node.meta for node, _ in sources):
        return ()
    numbers: list[Interval] = []
    for node, count in sources:
        given = node.meta.get(RANGE, (Interval(),))
        period = [interval for interval in given for _ in range(interval.count)]
        single = [Interval(low=i.low, high=i.high, whole=i.whole) for i in period]
        numbers += single * (count // len(single))
    return repeated(numbers)


def samples_in_range(
    input_range: InputRange, shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """Draw a batch of samples of `shape` whose numbers are in `input_range`."""

    def uniform(size: tuple[int, ...]) -> np.ndarray:
        return torch.rand(size, generator=generator).numpy()

    def normal(size: tuple[int, ...]) -> np.ndarray:
        return torch.randn(size, generator=generator).numpy()

    drawn = draw_samples(input_range, tuple(shape), uniform, normal)
    return torch.from_numpy(drawn.reshape(math.prod(shape))).view(shape).to(dtype)


def end_of_range(
    input_range: InputRange, shape: Sequence[int], dtype: torch.dtype, high: bool
) -> Tensor:
    """A batch of samples of `shape` with the largest (or smallest) numbers of `input_range`."""
    largest_draw = 1 - 2**-24

    def uniform(size: tuple[int, ...]) -> np.ndarray:
        return np.full(size, largest_draw if high else 0.0)

    return torch.from_numpy(draw_samples(input_range, tuple(shape), uniform, np.zeros)).to(dtype)
