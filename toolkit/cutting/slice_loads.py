"""Counts the load on each side of a cut, without building the graphs of the two sides.

A load is parameters plus activations, the numerator of a capacity (see `capacity.py`).
"""

from collections.abc import Iterable, Mapping, Set

from torch import Tensor
from torch.fx import Node

from toolkit.cutting.sample_flow import SampleFlow
from toolkit.submodels.capacity import activations_of


class LoadCounter:
    """Counts the load of operators that are added one after the other.

    Attributes:
        load: The load of all operators so far. Each operator and each tensor counts only once.
    """

    def __init__(self, flow: SampleFlow, parameters: Mapping[str, Tensor], batch: int) -> None:
        self._flow, self._parameters, self._batch = flow, parameters, batch
        self._counted = set[Node | str]()
        self.load = 0

    def add(self, node: Node, tensors: Set[str]) -> None:
        """Add an operator, the constants that it reads, and the parameters among `tensors`."""
        for counted in {node, *self._flow.behind(node)[1]} - self._counted:
            self._counted.add(counted)
            self.load += activations_of(counted, self._batch)
        for name in (tensors & self._parameters.keys()) - self._counted:
            self._counted.add(name)
            self.load += self._parameters[name].numel()


def loads_after(flow: SampleFlow, parameters: Mapping[str, Tensor], batch: int) -> list[int]:
    """Compute for each position the load of the operators after it.

    Loads never rise with the position. If operators on both sides of a position read a parameter,
    it does not count: it is not trained.

    Args:
        flow: The training graph.
        parameters: The parameters that count: the trained ones.
        batch: Samples in a batch.
    """
    counter, loads, first = LoadCounter(flow, parameters, batch), [], dict[str, Node]()
    for node in flow.operators:
        for name in flow.tensors_read(node):
            first.setdefault(name, node)
    for node in reversed(flow.operators):
        loads.append(counter.load)
        counter.add(node, {name for name in flow.tensors_read(node) if first[name] is node})
    return loads[::-1]


def load_of(
    operators: Iterable[Node], flow: SampleFlow, parameters: Mapping[str, Tensor], batch: int
) -> int:
    """The load of `operators` of `flow`."""
    counter = LoadCounter(flow, parameters, batch)
    for node in operators:
        counter.add(node, flow.tensors_read(node))
    return counter.load
