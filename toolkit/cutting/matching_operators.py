"""Finds the operator of the prediction graph that matches an operator of the training graph.

The two graphs of a model differ in the mode of their operators (dropout, batch norm), in copies,
and in code that the model runs in only one mode. Two operators match in three cases:

- both are computed from the samples by the same operators;
- the output is computed from both by the same operators;
- both are computed by the same operators from operators that match.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from exporters.programs.recorded_graph import module_of, output_node
from exporters.programs.seeded_random import DRAW
from toolkit.cutting.sample_flow import SampleFlow

aten = torch.ops.aten
SAME_VALUE = (aten.contiguous.default, aten.clone.default, aten.alias.default)
"""Operators whose result equals their input."""

Key = tuple[Any, ...]
EMPTY: Mapping[Node, int] = {}


class Matching:
    """Finds the operator of the graph `inference` that matches an operator of `training`."""

    def __init__(self, training: SampleFlow, inference: SampleFlow) -> None:
        self._masks = random_masks(training)
        keys = dict[Key, int]()
        self._numbers = self._numbered(training, keys)
        known = set(self._numbers.values())
        self._numbers |= self._numbered(inference, keys)
        # First match backwards from the output, then forwards from the samples and these matches.
        pairs = self._from_the_output(training, inference)
        seeds = {
            match: self._numbers[node]
            for node, match in pairs.items()
            if self._numbers[match] not in known
        }
        self._numbers |= self._numbered(inference, keys, seeds)
        self._matches = self._with_equal_numbers(training, inference)

    def __call__(self, node: Node) -> Node | None:
        """The operator of the prediction graph that matches `node`; None if there is none."""
        return self._matches.get(self.unchanged(node))

    def unchanged(self, node: Node) -> Node:
        """Follow copies and random masks back to the operator that computed the value.

        Returns `node` itself if it neither copies nor masks a value.
        """
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
        """Number the operators. Operators that compute the same from the samples get equal numbers.

        `seeds` are numbers of operators that are already known.
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
        """Map operators of the training graph to inference operators with the same number."""
        groups = [self._by_number(training), self._by_number(inference)]
        return {
            node: match
            for number, group in groups[0].items()
            # A model may compute an expression several times, in different modes.
            if len(group) == len(groups[1].get(number, ()))
            for node, match in zip(group, groups[1][number], strict=True)
        }

    def _by_number(self, flow: SampleFlow) -> dict[int, list[Node]]:
        """Map each number to its operators or samples in `flow`.

        Operators that only copy or mask are left out.
        """
        groups = defaultdict[int, list[Node]](list)
        for node in flow.position:
            if self._source(node) is None:
                groups[self._numbers[node]].append(node)
        return groups

    def _from_the_output(self, training: SampleFlow, inference: SampleFlow) -> dict[Node, Node]:
        """Pair operators, going back from the output as far as both graphs agree."""
        start = output_node(training.graph), output_node(inference.graph)
        pending = [(self.unchanged(start[0]), self.unchanged(start[1]))]
        matched, several = dict[Node, Node](), set[Node]()
        while pending:
            node, match = pending.pop()
            if node in matched:
                several |= {node} if matched[node] is not match else set()
                continue
            pairs = self._pairs_read(training, inference, node, match)
            if pairs is not None:
                matched[node] = match
                pending += pairs
        return {node: match for node, match in matched.items() if node not in several}

    def _pairs_read(
        self, training: SampleFlow, inference: SampleFlow, node: Node, match: Node
    ) -> list[tuple[Node, Node]] | None:
        """The activations that two operators read, in pairs; None if the operators differ."""
        reads = training.values_read(node), inference.values_read(match)
        if form(training, node) != form(inference, match) or len(reads[0]) != len(reads[1]):
            return None
        pairs = []
        for a, b in zip(*reads, strict=True):
            if a in training.position and b in inference.position:
                pairs.append((self.unchanged(a), self.unchanged(b)))
            elif self._numbers[a] != self._numbers[b]:
                return None
        return pairs


def random_masks(flow: SampleFlow) -> set[Node]:
    """The operators that compute random masks, which drop whole branches in a training graph.

    Operators that read only such masks count too, for example operators that scale a mask.
    """
    masks = set(flow.graph.graph.find_nodes(op="call_function", target=DRAW))
    for node in flow.graph.graph.nodes:
        reads = flow.values_read(node)
        if reads and set(reads) <= masks:
            masks.add(node)
    return masks


def form(flow: SampleFlow, node: Node) -> Key:
    """A key for the computation of `node`: operator, module, results, and integer arguments.

    Flags and probabilities, which differ between training and inference, are left out.
    """
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
