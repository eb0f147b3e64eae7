"""Loads of the two sides of a cut, counted from the whole graph without building their graphs.

A load is parameters plus activations, the numerator of a capacity (see `capacity.py`).
"""

from collections.abc import Iterable, Mapping

from torch import Tensor
from torch.fx import Node

from toolkit.cutting.sample_flow import SampleFlow
from toolkit.submodels.capacity import activations_of


class LoadCounter:
    """Counts the load of operators that are added one after the other.

    Attributes:
        load: The load of all operators so far. Operators and tensors count once.
    """

    def __init__(self, flow: SampleFlow, parameters: Mapping[str, Tensor], batch: int) -> None:
        self._flow, self._parameters, self._batch = flow, parameters, batch
        self._counted = set[Node | str]()
        self.load = 0

    def add(self, node: Node) -> None:
        """Add an operator, and the constants that it reads."""
        for one in {node, *self._flow.behind(node)[1]} - self._counted:
            self._counted.add(one)
            self.load += activations_of(one, self._batch)
        for name in self._flow.tensors_read(node) - self._counted:
            self._counted.add(name)
            self.load += self._parameters[name].numel() if name in self._parameters else 0


def loads_after(flow: SampleFlow, parameters: Mapping[str, Tensor], batch: int) -> list[int]:
    """The load of the operators after each place; loads never rise with the place.

    Args:
        flow: The training graph.
        parameters: The parameters that count: the trained ones.
        batch: Samples in a batch.
    """
    counter, loads = LoadCounter(flow, parameters, batch), []
    for node in reversed(flow.operators):
        loads.append(counter.load)
        counter.add(node)
    return loads[::-1]


def load_of(
    operators: Iterable[Node], flow: SampleFlow, parameters: Mapping[str, Tensor], batch: int
) -> int:
    """The load of `operators` of `flow`."""
    counter = LoadCounter(flow, parameters, batch)
    for node in operators:
        counter.add(node)
    return counter.load
