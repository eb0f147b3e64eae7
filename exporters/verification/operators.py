"""Compares each operator that a runtime executes with PyTorch's in float64, on the same inputs.

The runtime returns the values inside the graph. Each operator is computed again from the runtime's
own values of its inputs. So rounding does not add up from operator to operator, and masks that
depend on the sign of a value are equal on both sides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

from exporters.programs.program import ProgramSignature
from exporters.programs.tracing import Place, TracedGraph
from exporters.runtime_graph import Graph
from exporters.verification.errors import distance
from exporters.verification.graph_values import Result, leaf, run_graph

TOLERANCE = 1e-5
"""Largest error of an operator's result relative to its norm: sums of 10^5 float32 products are off
by less."""

NUDGE = 2**-23
"""The rounding error of a float32 number, relative to the number."""

SUMMED = 64
"""If an operator misses the tolerance, its inputs get random errors of NUDGE. The allowed error
grows by SUMMED times the change of the result, because a sum may cancel to almost zero. For a sum
of more numbers, it grows by their number times the change: each partial sum may be rounded."""

DRAWS = 8
"""How often the inputs of an operator with few results are nudged."""

TINY = 1e-35
"""A device may round numbers below this to zero."""

RUN_BYTES = 2**26
"""Most bytes of values that one run of the runtime returns."""


@dataclass(frozen=True)
class OperatorError:
    """The relative error of the result of `node`."""

    node: Node
    error: float


class OperatorCheck:
    """Compares the operators of one graph while `run_graph` computes them one by one.

    Attributes:
        worst: The operator with the largest error; None before the first comparison.
    """

    def __init__(
        self,
        signature: ProgramSignature,
        graph: Graph,
        traced: TracedGraph,
        feeds: Mapping[str, Tensor],
        generator: torch.Generator,
    ) -> None:
        self.worst: OperatorError | None = None
        self._signature, self._graph, self._traced = signature, graph, traced
        self._feeds, self._generator = feeds, generator
        self._ahead: list[list[str]] = []
        self._values: dict[str, np.ndarray] = {}

    def run(self, sizes: Mapping[str, int]) -> OperatorError | None:
        """Compare all operators.

        Args:
            sizes: Number of elements of each tensor in the traced graph, by its node's name.

        Returns:
            The worst operator; None if the runtime returns no value that can be compared.
        """
        names = [name for name in sizes if self._place(name) is not None]
        self._ahead = batches(names, sizes)
        inputs = [self._feeds[port.name] for port in self._signature.inputs]
        run_graph(self._traced.module, inputs, self._judge, self._nudge, keep_outputs=False)
        return self.worst

    def _judge(self, node: Node, result: Result) -> Result:
        """Compare the runtime's value of `node`, if there is one; later nodes read that value."""
        place = self._place(node.name)
        if place is None or not isinstance(result.value, Tensor):
            return result
        if self._ahead and node.name == self._ahead[0][0]:
            self._values.clear()  # before the next ones are in memory
            self._values = self._returned(self._ahead.pop(0))
        actual = as_traced(self._values[place.name], place, result.value.shape)
        if actual is None:
            error = OperatorError(node, float("inf"))
        else:
            error = self._compared(node, actual, result)
        if self.worst is None or error.error > self.worst.error:
            self.worst = error
        if actual is None:
            return result
        dtype = result.value.dtype
        return leaf(actual.to(dtype), self._nudge)

    def _place(self, name: str) -> Place | None:
        """The runtime's tensor with the value of the node called `name`; None if there is none."""
        place = self._traced.places.get(name)
        return None if place is None or place.name in self._graph.dropped else place

    def _compared(self, node: Node, actual: Tensor, result: Result) -> OperatorError:
        """The error of `actual`, which a runtime computed for the float64 `result`."""
        difference, size = distance(actual, result.value)
        scale = max(size, TINY * max(1, actual.numel()) ** 0.5)
        if difference <= TOLERANCE * scale:
            return OperatorError(node, difference / scale)
        # A single number may move by almost nothing by chance, so a small result is drawn often.
        draws = DRAWS if actual.numel() < DRAWS**2 else 1
        moved = max(distance(result.nudged(), result.value)[0] for _ in range(draws))
        summed = max(SUMMED, result.read / max(1, actual.numel()))
        explained = scale + summed / TOLERANCE * moved
        passes = difference <= TOLERANCE * explained
        return OperatorError(node, difference / (explained if passes else scale))

    def _nudge(self, value: Tensor) -> Tensor:
        """Add random rounding errors to `value`."""
        if not value.is_floating_point():
            return value
        noise = torch.randn(value.shape, generator=self._generator, dtype=torch.float64)
        return value * (1 + NUDGE * noise)

    def _returned(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """The runtime's values of the nodes called `names`, by the runtime's tensor name."""
        wanted = list(dict.fromkeys(self._traced.places[name].name for name in names))
        given = {n: t.numpy() for n, t in self._feeds.items() if n not in self._graph.held}
        return self._traced.values(self._graph.data, given, wanted)


def batches(names: Sequence[str], sizes: Mapping[str, int]) -> list[list[str]]:
    """Divide `names`, in order, into parts whose values take at most RUN_BYTES."""
    parts: list[list[str]] = []
    left = 0
    for name in names:
        if not parts or sizes[name] * 4 > left:
            parts.append([])
            left = RUN_BYTES
        parts[-1].append(name)
        left -= sizes[name] * 4
    return parts


def as_traced(value: np.ndarray, place: Place, shape: Sequence[int]) -> Tensor | None:
    """Give a runtime's value the axes and the `shape` of its node; None if it does not fit."""
    if place.axes is None:
        return torch.from_numpy(value) if value.shape == tuple(shape) else None
    try:
        value = value.transpose(place.axes)
        return torch.from_numpy(np.broadcast_to(value, shape).copy())
    except ValueError:
        return None
