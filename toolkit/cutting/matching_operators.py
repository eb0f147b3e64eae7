"""Which operator of the prediction graph computes the same value as one of the training graph.

The two graphs of a model differ in the mode of their operators (dropout, batch norm), in copies,
and in whatever the model's code does in one mode only. Two operators match if they compute the same
expression of the samples, if the output is the same expression of both, or if they compute the same
expression of operators that match.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from exporters.programs.dropout import DRAW
from exporters.programs.recorded_graph import module_of, output_node
from toolkit.cutting.sample_flow import SampleFlow

aten = torch.ops.aten
SAME_VALUE = (aten.contiguous.default, aten.clone.default, aten.alias.default)
"""Operators whose result equals their input."""

Key = tuple[Any, ...]
EMPTY: Mapping[Node, int] = {}


class Matching:
    """Finds the operators of the graph `inference` that match those of the graph `training`."""

    def __init__(self, training: SampleFlow, inference: SampleFlow) -> None:
        self._masks = random_masks(training)
        keys = dict[Key, int]()
        self._numbers = self._numbered(training, keys)
        known = set(self._numbers.values())
        self._numbers |= self._numbered(inference, keys)
        # From the output backwards first, then from the samples and from what is found forwards.
        pairs = self._from_the_output(training, inference)
        seeds = {
            other: self._numbers[node]
            for node, other in pairs.items()
            if self._numbers[other] not in known
        }
        self._numbers |= self._numbered(inference, keys, seeds)
        self._found = self._with_equal_numbers(training, inference)

    def __call__(self, node: Node) -> Node | None:
        """The operator of the prediction graph that matches `node`; None if there is none."""
        return self._found.get(self.unchanged(node))

    def unchanged(self, node: Node) -> Node:
        """The operator whose value `node` has, but for copies and random masks."""
        while (source := self._source(node)) is not None:
            node = source
        return node

    def _source(self, node: Node) -> Node | None:
        """The input of `node` if `node` only copies or masks it, else None."""
        reads = [read for read in node.all_input_nodes if read not in self._masks]
        copies = node.target in SAME_VALUE and len(reads) == 1
        masks = len(reads) == 1 < len(node.all_input_nodes) and node not in self._masks
        return reads[0] if copies or masks else None

    def _numbered(
        self, flow: SampleFlow, keys: dict[Key, int], seeds: Mapping[Node, int] = EMPTY
    ) -> dict[Node, int]:
        """A number for each operator: equal numbers mean equal expressions of the samples.

        `seeds` are numbers of operators that are known otherwise.
        """
        numbers = dict[Node, int]()
        for node in flow.graph.graph.nodes:
            source = self._source(node)
            if source is None:
                reads = tuple(numbers[read] for read in flow.values_read(node))
                own = keys.setdefault((*form(flow, node), reads), len(keys))
                numbers[node] = seeds.get(node, own)
            else:
                numbers[node] = numbers[source]
        return numbers

    def _with_equal_numbers(self, training: SampleFlow, inference: SampleFlow) -> dict[Node, Node]:
        """The operators of the same number in both graphs."""
        groups = [self._by_number(training), self._by_number(inference)]
        return {
            one: other
            for number, group in groups[0].items()
            # A model may compute an expression several times, in different modes.
            if len(group) == len(groups[1].get(number, ()))
            for one, other in zip(group, groups[1][number], strict=True)
        }

    def _by_number(self, flow: SampleFlow) -> dict[int, list[Node]]:
        """The operators of `flow` with each number, and the samples, without copies."""
        groups = defaultdict[int, list[Node]](list)
        for node in flow.position:
            if self._source(node) is None:
                groups[self._numbers[node]].append(node)
        return groups

    def _from_the_output(self, training: SampleFlow, inference: SampleFlow) -> dict[Node, Node]:
        """Operators of which the output is the same expression in both graphs."""
        start = output_node(training.graph), output_node(inference.graph)
        pending = [(self.unchanged(start[0]), self.unchanged(start[1]))]
        matched, several = dict[Node, Node](), set[Node]()
        while pending:
            one, other = pending.pop()
            if one in matched:
                several |= {one} if matched[one] is not other else set()
                continue
            pairs = self._pairs_read(training, inference, one, other)
            if pairs is not None:
                matched[one] = other
                pending += pairs
        return {one: other for one, other in matched.items() if one not in several}

    def _pairs_read(
        self, training: SampleFlow, inference: SampleFlow, one: Node, other: Node
    ) -> list[tuple[Node, Node]] | None:
        """The activations that two operators read, in pairs; None if the operators differ."""
        reads = training.values_read(one), inference.values_read(other)
        if form(training, one) != form(inference, other) or len(reads[0]) != len(reads[1]):
            return None
        pairs = []
        for a, b in zip(*reads, strict=True):
            if a in training.position and b in inference.position:
                pairs.append((self.unchanged(a), self.unchanged(b)))
            elif self._numbers[a] != self._numbers[b]:
                return None
        return pairs


def random_masks(flow: SampleFlow) -> set[Node]:
    """The random masks of a training graph, which drop whole branches; also scaled ones."""
    masks = set(flow.graph.graph.find_nodes(op="call_function", target=DRAW))
    for node in flow.graph.graph.nodes:
        reads = flow.values_read(node)
        if reads and set(reads) <= masks:
            masks.add(node)
    return masks


def form(flow: SampleFlow, node: Node) -> Key:
    """What `node` computes of what it reads, without its mode: flags and probabilities."""
    value = node.meta.get("val")
    results = [
        described(flow, result)
        for result in (value if isinstance(value, tuple | list) else [value])
    ]
    name = "input" if node.op == "placeholder" else str(node.target)
    return name, module_of(node), tuple(results), tuple(integers_in((node.args, node.kwargs)))


def described(flow: SampleFlow, value: object) -> Key:
    """Type and sizes of `value`; sizes that depend on the batch size are expressions in n."""
    sizes = value.shape if isinstance(value, Tensor) else [value]
    symbol = str(flow.batch.node.expr)
    kind = str(value.dtype) if isinstance(value, Tensor) else ""
    return kind, *(str(size).replace(symbol, "n") for size in sizes)


def integers_in(arguments: object) -> Iterator[int | str]:
    """The integers and names in the arguments of an operator, such as axes and sizes."""
    if isinstance(arguments, dict):
        yield from integers_in(tuple(arguments.values()))
    elif isinstance(arguments, tuple | list):
        for argument in arguments:
            yield from integers_in(argument)
    elif isinstance(arguments, int | str) and not isinstance(arguments, bool):
        yield arguments
