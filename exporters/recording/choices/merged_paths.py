"""Merges the recordings of all paths through a model's code into one graph.

If the paths differ, `torch.where` chooses by the value that the code asked for. The choice is made
as early as possible. For example, the layers after `x = x / 1000 if x.max() > 100 else x` exist
only once, because f(where(c, a, b)) = where(c, f(a), f(b)).
"""

import heapq
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import SymInt
from torch.fx import Graph, GraphModule, Node, map_arg
from torch.fx.node import map_aggregate

from exporters.programs.recorded_graph import attribute, keeps_new_value, writes_in_place
from exporters.programs.seeded_random import UNIFORM
from exporters.programs.source_lines import line_of_node
from exporters.recording.choices.decisions import Path, marked
from exporters.recording.choices.guarded_gradients import guard_gradients
from exporters.recording.choices.norm_statistics import (
    separate_statistics,
    statistics_of_some_paths,
    updates_statistics,
)
from exporters.recording.functional_form import alike
from exporters.recording.graph_checks import draws
from exporters.recording.graph_cleanup import only_counts

aten = torch.ops.aten
CHOICES = "chooses between paths"
"""The key in the `meta` of a merged graph."""


class NotMerged(Exception):  # noqa: N818 - users never see it
    """The recordings cannot be merged."""


@dataclass
class Ends:
    """The results of one path, as nodes of the merged graph.

    Attributes:
        asked: The values by which the code decides.
        results: The values that the path returns.
        stored: New values of tensors that stay in the model, by the tensor's node.
        norms: How often the path runs each batch norm, by the node of the running mean.
    """

    asked: list[Node] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    stored: dict[Node, Node] = field(default_factory=dict)
    norms: Counter[object] = field(default_factory=Counter)


def merged(paths: Sequence[Path], state: set[str]) -> GraphModule:
    """One graph for all `paths`. At run time, values decide which path's results it returns.

    Args:
        paths: Recordings in functional form. A path that is missing ends in an error.
        state: The names of the model's tensors, which are the same on all paths.

    Raises:
        NotMerged: The paths differ in a number of axes, a size, a type or in the tensors that they
            write.
    """
    means = statistics_of_some_paths([path.graph for path in paths])
    for path in paths:
        separate_statistics(path.graph, means)
    merge = Merge(paths[0].graph, state)
    ends = [(path.taken, merge.add(path.graph)) for path in paths]
    with deep_recursion():
        chosen = merge.choose(ends, 0)
    return merge.finished(chosen, [end for _, end in ends])


class Merge:
    """A graph with the operators of all paths. Operators that several paths share exist once.

    Attributes:
        known: The nodes of all added paths, by their computation.
    """

    def __init__(self, base: GraphModule, state: set[str]) -> None:
        self._base, self._state, self._graph = base, state, Graph()
        self.known: dict[object, Node] = {}
        self._joined: dict[tuple[Node, Node, Node], Node | None] = {}
        self._order: dict[Node, int] = {}
        self._numbers: dict[Node, object] = {}
        self._choices: list[Node] = []

    def add(self, path: GraphModule) -> Ends:
        """Add the recording of one path."""
        twins, ends, seen = dict[Node, Any](), Ends(), Counter[object]()
        for node in path.graph.nodes:
            args, kwargs = map_arg((node.args, node.kwargs), twins.get)
            if node.op == "output":
                ends.results = list(flattened(args))
            elif marked(node):
                ends.asked.append(args[0])
            elif only_counts(path, node):
                continue
            elif keeps_new_value(node):
                ends.stored[args[0]] = args[1]
            elif node.op == "get_attr":
                twins[node] = self._attribute(path, node)
            elif node.op == "placeholder":
                twins[node] = self._once(("input", node.target), node, (), {})
            elif node.op == "call_function" and not writes_in_place(node):
                key = node.target, frozen(args), frozen(kwargs)
                place = (len(ends.asked), line_of_node(node)) if node.target is UNIFORM else None
                seen[key, place] += draws(node) or node.target is aten.batch_norm.default
                # Draws have equal arguments, so the place identifies the same draw on other paths.
                number = seen[key, place], place
                twins[node] = self._once((key, number), node, args, kwargs)
                self._numbers[twins[node]] = number
                if updates_statistics(node):
                    ends.norms[args[3]] += 1
            elif node.target != "_guards_fn":
                raise NotMerged
        return ends

    def choose(self, ends: Sequence[tuple[tuple[bool, ...], Ends]], depth: int) -> Ends:
        """The result of the model if its first `depth` decisions are the decisions of `ends`."""
        yes, no = (
            [end for end in ends if len(end[0]) > depth and end[0][depth] is answer]
            for answer in (True, False)
        )
        if not yes or not no:
            return self.choose(yes or no, depth + 1) if yes or no else ends[0][1]
        asked = yes[0][1].asked[depth]
        one, other = self.choose(yes, depth + 1), self.choose(no, depth + 1)
        if len(one.results) != len(other.results):
            raise NotMerged
        results = [
            self._either(asked, a, b) for a, b in zip(one.results, other.results, strict=True)
        ]
        stored = {
            kept: self._either(asked, one.stored.get(kept, kept), other.stored.get(kept, kept))
            for kept in {**one.stored, **other.stored}
        }
        return Ends([], results, stored)

    def finished(self, chosen: Ends, ends: Sequence[Ends]) -> GraphModule:
        """The graph that computes `chosen`.

        Raises NotMerged if it does not run each batch norm as often as each of the `ends`.
        """
        for kept, value in chosen.stored.items():
            store = self._graph.call_function(aten.copy_.default, (kept, value))
            store.meta = {**value.meta, "val": kept.meta["val"]}
            self._order[store] = len(self._order)
        last = self._base.graph.output_node()
        self._graph.output(map_results(last.args[0], iter(chosen.results)))
        self._graph.output_node().meta = dict(last.meta)
        self._in_order()
        self._graph.eliminate_dead_code(
            is_impure_node=lambda n: n.op in ("placeholder", "output") or keeps_new_value(n)
        )
        for node, guarded in guard_gradients(self._graph, self._choices):
            self._order[node] = self._order[guarded]
        self._in_order()
        norms = Counter(node.args[3] for node in self._graph.nodes if updates_statistics(node))
        if any(end.norms != norms for end in ends):
            raise NotMerged
        self._graph.set_codegen(self._base.graph._codegen)
        self._base.graph = self._graph
        self._base.meta[CHOICES] = True
        return self._base

    def again(self, node: Node, args: Any, kwargs: Any) -> Node:
        """The operator of `node` for other arguments."""
        if args == node.args and kwargs == node.kwargs:
            return node
        key = (node.target, frozen(args), frozen(kwargs)), self._numbers.get(node)
        return self._once(key, node, args, kwargs)

    def _in_order(self) -> None:
        """Sort the nodes: each after those that it reads, otherwise in the order of the paths."""
        left = {node: len(set(node.all_input_nodes)) for node in self._graph.nodes}
        order = self._order | {self._graph.output_node(): sys.maxsize}
        ready = [(order[node], node.name, node) for node, count in left.items() if not count]
        heapq.heapify(ready)
        end = self._graph.output_node()
        while ready:
            _, _, node = heapq.heappop(ready)
            if node is not end:
                end.prepend(node)
            for user in node.users:
                left[user] -= 1
                if not left[user]:
                    heapq.heappush(ready, (order[user], user.name, user))

    def _attribute(self, path: GraphModule, node: Node) -> Node:
        """The node that reads the tensor that `node` reads in `path`."""
        name = str(node.target)
        if name in self._state:
            return self._once(("state", name), node, (), {})
        value = attribute(path, name)
        raw = value.detach().contiguous().flatten().view(torch.uint8)  # numpy has no bfloat16
        key = value.dtype, tuple(value.shape), raw.numpy().tobytes()
        if key not in self.known and path is not self._base:
            name = f"constant_of_path_{len(self.known)}"
            self._base.register_buffer(name, value.detach(), persistent=False)
        twin = self._once(key, node, (), {})
        if twin.target == node.target and name != node.target:
            twin.target = name
        return twin

    def _once(self, key: object, node: Node, args: Any, kwargs: Any) -> Node:
        """The node for `key`; a copy of `node` with these arguments if there is none."""
        if key not in self.known:
            if node.op == "placeholder":
                args = node.args
            twin = self._graph.create_node(node.op, node.target, args, kwargs, node.name)
            twin.meta = dict(node.meta)
            self.known[key] = twin
            self._order[twin] = len(self._order)
        return self.known[key]

    def _either(self, asked: Node, one: Any, other: Any) -> Any:
        """`one` if `asked` is true, else `other`. Raises NotMerged if no graph can choose."""
        if not isinstance(one, Node) or not isinstance(other, Node):
            if one is other or one == other:
                return one
            raise NotMerged
        node = self._join(asked, one, other)
        if node is None:
            raise NotMerged
        return node

    def _join(self, asked: Node, one: Node, other: Node) -> Node | None:
        """A node that is `one` if `asked` is true, else `other`; None if no graph can choose."""
        if one is other:
            return one
        key = asked, one, other
        if key not in self._joined:
            self._joined[key] = self._same_operator(*key) or self._where(*key)
        return self._joined[key]

    def _same_operator(self, asked: Node, one: Node, other: Node) -> Node | None:
        """The operator of both nodes on choices of their arguments; None if they do not match."""
        if not same_form(one, other):
            return None
        joined = [self._join(asked, a, b) for a, b in pairs(one, other)]
        if None in joined:
            return None
        left = iter(joined)
        args, kwargs = map_arg((one.args, one.kwargs), lambda _: next(left))
        return self._new(one.target, args, kwargs, one)

    def where(self, asked: Node, one: Node, other: Node) -> Node:
        """A choice between two tensors of the same shape and type. Equal choices share one node."""
        key = asked, one, other
        if one is not other and key not in self._joined:
            self._joined[key] = self._where(*key)
        chosen = one if one is other else self._joined[key]
        assert chosen is not None
        return chosen

    def _where(self, asked: Node, one: Node, other: Node) -> Node | None:
        """A choice between two tensors of the same shape and type; None for others."""
        if not alike(one, other):
            return None
        self._choices.append(self._new(aten.where.self, (asked, one, other), {}, one))
        return self._choices[-1]

    def _new(self, target: Any, args: Any, kwargs: Any, like: Node) -> Node:
        node = self._graph.call_function(target, args, kwargs)
        node.meta = dict(like.meta)
        self._order[node] = self._order[like]
        return node


def same_form(one: Node, other: Node) -> bool:
    """Whether two nodes call the same operator and differ at most in the values that they read."""
    if one.op != "call_function" or one.target is not other.target:
        return False
    arguments = (one.args, one.kwargs), (other.args, other.kwargs)
    if frozen(map_arg(arguments[0], blank)) != frozen(map_arg(arguments[1], blank)):
        return False
    # Layers must read weights directly, because families look for them there.
    return not any(a is not b and "get_attr" in (a.op, b.op) for a, b in pairs(one, other))


def pairs(one: Node, other: Node) -> Iterator[tuple[Node, Node]]:
    """The values that two operators of the same form read, one by one."""
    return zip(nodes_in((one.args, one.kwargs)), nodes_in((other.args, other.kwargs)), strict=True)


def blank(_: Node) -> str:
    """The same text for every node, so that a comparison of arguments ignores their nodes."""
    return "node"


def nodes_in(arguments: Any) -> list[Node]:
    """The nodes in `arguments`. A node that occurs several times is repeated."""
    found: list[Node] = []
    map_arg(arguments, found.append)
    return found


def frozen(value: Any) -> Any:
    """Turn `value`, an argument of an operator, into a key of a dictionary. 1 differs from True."""
    if isinstance(value, tuple | list):
        return tuple(map(frozen, value))
    if isinstance(value, dict):
        return tuple((name, frozen(entry)) for name, entry in sorted(value.items()))
    if isinstance(value, slice):
        return "slice", frozen((value.start, value.stop, value.step))
    return value if isinstance(value, Node | SymInt) else (type(value), str(value))


def flattened(returned: Any) -> Iterator[Any]:
    """The values in the tuples and lists that a graph returns."""
    if isinstance(returned, tuple | list):
        for value in returned:
            yield from flattened(value)
    else:
        yield returned


def map_results(returned: Any, results: Iterator[Any]) -> Any:
    """Bring `results` into the form of a graph's result."""
    return map_aggregate(returned, lambda _: next(results))


@contextmanager
def deep_recursion() -> Iterator[None]:
    """Context in which functions may call themselves once for each operator of a model."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, 100_000))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
