"""Compares single operators in a runtime with PyTorch's operators in float64, on the same inputs.

Runtime and PyTorch compute an operator from the same values of its inputs. So rounding errors do
not add up from operator to operator. Masks that depend on the sign of a value are equal in both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from exporters.programs.tracing import Place, TracedGraph
from exporters.runtime_graph import Graph
from exporters.verification.errors import distance
from exporters.verification.graph_values import Cone, Values, cone_of, evaluated

TOLERANCE = 1e-5
"""Largest error of an operator's result relative to its norm. Sums of 10^5 float32 products have a
smaller error."""

CLOSE = 0.1 * TOLERANCE
"""An error above this is compared with the effect of rounding; see SUMMED. Without this, a sum that
cancels, such as the mean of a layer norm's result, could miss the tolerance by chance."""

NUDGE = 2**-23
"""The rounding error of a float32 number, relative to the number."""

SUMMED = 64
"""If an operator's error is above CLOSE, its inputs get random errors of NUDGE. The allowed error
grows by SUMMED times the change of the result, because a sum may cancel to almost zero. For a sum
of more than SUMMED numbers, the factor is their number, because each partial sum may be rounded."""

DRAWS = 8
"""How often the inputs of an operator with few results are nudged."""

COMPARES = ("eq", "ne", "lt", "le", "gt", "ge")
"""Operators, by name, whose result a rounding error of an operand can change."""

TINY = 1e-35
"""A device may round numbers below this to zero."""

RUN_BYTES = 2**26
"""Most bytes of values that one run of the runtime returns."""


@dataclass(frozen=True)
class OperatorError:
    """The relative error of the result of `node`, and the form of the graph that computed it."""

    node: Node
    error: float
    form: str | None = None


class Comparison:
    """Compares operators of the traced graph `module` with their results in a runtime.

    Attributes:
        worst: The operator with the largest error. None before the first comparison.
    """

    def __init__(self, module: GraphModule, generator: torch.Generator) -> None:
        self.worst: OperatorError | None = None
        self._module, self._generator = module, generator

    def add(
        self, cone: Cone, leaves: Values, actual: Tensor | None, form: str | None = None
    ) -> bool:
        """Compare `actual`, which a runtime computed from `leaves`, with PyTorch in float64.

        Args:
            cone: The operators of the traced graph that compute the same value from `leaves`.
            leaves: The values of the cone's leaves.
            actual: The runtime's value. None if its shape is wrong.
            form: The form of the graph that the runtime computed.

        Returns:
            Whether `actual` is correct.
        """
        error = float("inf") if actual is None else self._error(cone, leaves, actual)
        if self.worst is None or error > self.worst.error:
            self.worst = OperatorError(cone.nodes[-1], error, form)
        return error <= TOLERANCE

    def _error(self, cone: Cone, leaves: Values, actual: Tensor) -> float:
        """The error of `actual` relative to the error that rounding can cause."""
        right, read = evaluated(self._module, cone, leaves)
        if actual.shape != right.shape:
            return float("inf")
        if right.dtype == torch.bool and len(cone.nodes) > 1:
            actual = torch.where(self._nearly_equal(cone, leaves), right, actual)
        difference, size = distance(actual, right)
        scale = max(size, TINY * max(1, actual.numel()) ** 0.5)
        if difference <= CLOSE * scale:
            return float(difference / scale)
        # By chance, rounding may hardly move a single number, so small results get several draws.
        draws = DRAWS if actual.numel() < DRAWS**2 else 1
        moved = max(self._moved(cone, leaves, right) for _ in range(draws))
        summed = max(SUMMED, read / max(1, actual.numel()))
        explained = scale + summed / TOLERANCE * moved
        passes = difference <= TOLERANCE * explained
        return float(difference / (explained if passes else scale))

    def _nearly_equal(self, cone: Cone, leaves: Values) -> Tensor:
        """Where the operands of the last operator of `cone`, a comparison, may be equal.

        If the runtime computes an operand inside the cone in float32, the largest of several
        numbers equals one of these numbers only there.
        """
        last, known = cone.nodes[-1], set(cone.leaves)
        operands, noise = list[Tensor](), torch.tensor(0.0, dtype=torch.float64)
        if getattr(last.target, "__name__", "").partition(".")[0] in COMPARES:
            number = {node: n for n, node in enumerate((*cone.leaves, *cone.nodes))}
            for node in last.args:
                value: object = node
                if isinstance(node, Node) and node in known:
                    value = leaves[node]
                elif isinstance(node, Node):
                    own = cone_of(node, known.__contains__, number)
                    value, _ = evaluated(self._module, own, {n: leaves[n] for n in own.leaves})
                    # Where a sum cancels, its rounding error is large relative to its value.
                    for _ in range(DRAWS):
                        nudged = {n: self._nudge(leaves[n]) for n in own.leaves}
                        moved = (evaluated(self._module, own, nudged)[0].double() - value).abs()
                        noise = torch.maximum(noise, moved)
                operands.append(torch.as_tensor(value, dtype=torch.float64))
        if len(operands) != 2:
            return torch.tensor(False)
        one, other = operands
        rounded = NUDGE * torch.maximum(one.abs(), other.abs()) + noise
        return (one - other).abs() <= SUMMED * rounded

    def _moved(self, cone: Cone, leaves: Values, right: Tensor) -> float:
        """How far random rounding errors in the leaves of a cone move its value."""
        nudged = {node: self._nudge(value) for node, value in leaves.items()}
        return distance(evaluated(self._module, cone, nudged)[0], right)[0]

    def _nudge(self, value: object) -> object:
        """Add random rounding errors to `value`."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        noise = torch.randn(value.shape, generator=self._generator, dtype=torch.float64)
        return value * (1 + NUDGE * noise)


def compare_exposed(
    comparison: Comparison,
    graph: Graph,
    traced: TracedGraph,
    feeds: Sequence[Tensor],
    names: Sequence[str],
    shapes: Mapping[Node, torch.Size],
) -> None:
    """Compare all operators of a graph, if its runtime can return the values inside the graph.

    Each operator is computed again from the runtime's own values of its inputs.

    Args:
        comparison: Compares each operator.
        graph: The graph in the runtime.
        traced: The traced graph.
        feeds: The inputs of both graphs, in order.
        names: The names of the inputs.
        shapes: The shape of each tensor in the traced graph.
    """
    assert traced.values is not None
    places = {
        node: place
        for node in traced.module.graph.nodes
        if node in shapes and (place := traced.places.get(node.name)) is not None
        if place.name not in graph.dropped
    }
    order = {node: number for number, node in enumerate(traced.module.graph.nodes)}
    cones = [cone_of(node, places.__contains__, order) for node in places]
    last_reader = {leaf: cone for cone in cones for leaf in cone.leaves}
    given = {
        name: value.numpy()
        for name, value in zip(names, feeds, strict=True)
        if name not in graph.held
    }
    known = dict(zip(traced.module.graph.find_nodes(op="placeholder"), feeds, strict=True))
    for part in batches(cones, shapes):
        wanted = list(dict.fromkeys(places[cone.nodes[-1]].name for cone in part))
        returned = traced.values(graph.data, given, wanted)
        for cone in part:
            node = cone.nodes[-1]
            actual = as_traced(returned[places[node].name], places[node], shapes[node])
            leaves = {leaf: known[leaf] for leaf in cone.leaves}
            comparison.add(cone, leaves, actual)
            if actual is None:
                return
            if node in last_reader:
                known[node] = actual
            for leaf in cone.leaves:
                if last_reader[leaf] is cone:
                    del known[leaf]


def batches(cones: Sequence[Cone], shapes: Mapping[Node, torch.Size]) -> list[list[Cone]]:
    """Divide `cones`, in order, into parts whose values take at most RUN_BYTES."""
    parts: list[list[Cone]] = []
    left = 0
    for cone in cones:
        size = 4 * shapes[cone.nodes[-1]].numel()
        if not parts or size > left:
            parts.append([])
            left = RUN_BYTES
        parts[-1].append(cone)
        left -= size
    return parts


def as_traced(value: np.ndarray, place: Place, shape: Sequence[int]) -> Tensor | None:
    """Give a runtime's value the axes and `shape` of its node. None if the value does not fit."""
    if place.axes is None:
        return torch.from_numpy(value) if value.shape == tuple(shape) else None
    try:
        value = value.transpose(place.axes)
        return torch.from_numpy(np.broadcast_to(value, shape).copy())
    except ValueError:
        return None
