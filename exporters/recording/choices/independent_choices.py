"""Merges the paths through code with many choices that do not depend on each other.

If each of n layers may be skipped, there are 2^n paths. Here only n + 2 paths are recorded. One
path has only the answer no, and one path has only the answer yes. The longer of these two is the
base. Each of the other n paths differs from the base in the answer to one question. For each
question, `torch.where` chooses between the base and the values of the path with the other answer.
Further paths check the result: in them, each pair of questions gets all four pairs of answers, and
the choices must lead to the operators of these paths.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node, map_arg

from exporters.programs.interrupts import raise_if_interrupted
from exporters.recording.choices.decisions import LARGEST_NUMBER, Decisions, Path, same_attributes
from exporters.recording.choices.merged_paths import (
    Ends,
    Merge,
    NotMerged,
    deep_recursion,
    nodes_in,
    pairs,
    same_form,
)
from exporters.recording.choices.norm_statistics import (
    separate_statistics,
    statistics_of_some_paths,
)
from exporters.recording.functional_form import alike

Answers = tuple[bool, ...]
Place = tuple[Node | None, int]
"""An operator and the number of its argument; for results and stored values, None."""
Record = Callable[[Decisions], GraphModule]
SEED = 0
LARGEST_SIZE = 50_000
"""Code whose recorded paths together have more operators than this is refused."""


def independent_choices(
    alike: Sequence[Path], module: nn.Module, record: Record, state: set[str]
) -> GraphModule | None:
    """One graph for all paths. None if the choices depend on each other.

    Args:
        alike: The path with only the answer no, and the path with only the answer yes.
        module: The module that `record` records.
        record: Records the module with these decisions. The graph has no writes in place.
        state: The names of the model's tensors.
    """
    if len(alike) < 2 or len(alike[0].taken) != len(alike[1].taken):
        return None
    with suppress(NotMerged):
        # The longest path has the layers that the others leave out.
        base = max(alike, key=lambda path: len(path.graph.graph.nodes))
        count, size = len(base.taken), len(base.graph.graph.nodes)
        single = [tuple(a is not (n == k) for n, a in enumerate(base.taken)) for k in range(count)]
        several = list(covering(count))
        if count > LARGEST_NUMBER or size * (count + len(several)) > LARGEST_SIZE:
            return None
        paths = [recorded(module, record, answers) for answers in single]
        means = statistics_of_some_paths([base.graph, *(path.graph for path in paths)])
        for path in (base, *paths):
            separate_statistics(path.graph, means)
        choices = Choices(base, state)
        for number, path in enumerate(paths):
            choices.add_difference(number, path.graph)
            choices.check(path)
        for answers in several:
            path = recorded(module, record, answers)
            separate_statistics(path.graph, means)
            choices.check(path)
        return choices.finished()
    return None


def recorded(module: nn.Module, record: Record, given: Answers) -> Path:
    """The path with these answers.

    Raises NotMerged if the code fails, or asks more or fewer questions.
    """
    decisions = Decisions(given)
    try:
        with same_attributes(module):
            graph = record(decisions)
    except Exception as error:  # the user's code may raise any error
        raise_if_interrupted(error)
        raise NotMerged from error
    if len(decisions.taken) != len(given):
        raise NotMerged
    return Path(given, graph)


def covering(count: int) -> Iterator[Answers]:
    """Answers to `count` questions. Each pair of questions gets all four pairs of answers."""
    draw = random.Random(SEED)
    missing = {
        (i, j, *pair)
        for i in range(count)
        for j in range(i + 1, count)
        for pair in product((False, True), repeat=2)
    }
    while missing:
        tries = [tuple(draw.random() < 0.5 for _ in range(count)) for _ in range(50)]
        found = [{(i, j, a[i], a[j]) for i, j, *_ in missing} & missing for a in tries]
        best = max(range(len(tries)), key=lambda n: len(found[n]))
        missing -= found[best]
        yield tries[best]


class Choices:
    """A graph in which each question chooses between two values of some arguments.

    Args:
        base: The path that has the most operators.
        state: The names of the model's tensors.
    """

    def __init__(self, base: Path, state: set[str]) -> None:
        self._merge, self._taken = Merge(base.graph, state), base.taken
        self._base = self._merge.add(base.graph)
        self._stored, self._own = list(self._base.stored), set(self._merge.known.values())
        # The question, and the value that is read for the other answer. The keys are a reading
        # operator and the number of its argument, or a value if all its readers read another value
        # then.
        self._other: dict[Place, tuple[int, Node]] = {}
        self._replaced: dict[Node, tuple[int, Node]] = {}
        self._readers = self._places()

    def add_difference(self, number: int, graph: GraphModule) -> None:
        """Store how `graph` differs from the base. Only question `number` has another answer in it.

        Raises NotMerged if the differences cannot be chosen.
        """
        ends, seen = self._merge.add(graph), set[tuple[Node, Node]]()
        found = dict[Place, tuple[Node, Node]]()
        with deep_recursion():
            for index, (one, other) in enumerate(zip(*self._values(ends), strict=True)):
                compare((None, index), one, other, self._own, found, seen)
        by_value = self._by_value(found)
        for other, places in by_value.items():
            one, *more = set(places.values())
            if not more and places.keys() >= self._readers[other] and other not in self._replaced:
                self._replaced[other] = number, one
                continue
            for place, one in places.items():
                if place in self._other:
                    raise NotMerged
                self._other[place] = number, one

    def _by_value(self, found: dict[Place, tuple[Node, Node]]) -> dict[Node, dict[Place, Node]]:
        """The values of the base that the path replaces, with each place and the value read there.

        If x is replaced in one place and transpose(x) in another place, x is replaced in both
        places.
        """
        while True:
            values = defaultdict[Node, dict[Place, Node]](dict)
            for place, (one, other) in found.items():
                values[other][place] = one
            for other, places in values.items():
                one, *more = set(places.values())
                if more or not same_form(one, other) or places.keys() < self._readers[other]:
                    continue
                differing = [(n, a, b) for n, (a, b) in enumerate(pairs(one, other)) if a is not b]
                if len(differing) == 1 and differing[0][1:] in found.values():
                    for place in places:
                        del found[place]
                    found[other, differing[0][0]] = differing[0][1:]
                    break
            else:
                return values

    def _places(self) -> dict[Node, set[Place]]:
        """Where the base reads each value."""
        places, done = defaultdict[Node, set[Place]](set), set[Node]()
        _, base = self._values(self._base)
        ahead: list[tuple[Place, Any]] = [((None, n), value) for n, value in enumerate(base)]
        ahead += [((None, -1), asked) for asked in self._base.asked]
        while ahead:
            place, value = ahead.pop()
            if not isinstance(value, Node):
                continue
            places[value].add(place)
            if value not in done:
                done.add(value)
                ahead += [((value, n), read) for n, read in enumerate(arguments_of(value))]
        return places

    def _values(self, ends: Ends) -> tuple[list[Any], list[Any]]:
        """The values that the path with these `ends` returns and stores, and those of the base."""
        if not ends.stored.keys() <= set(self._stored):
            raise NotMerged
        values, base = (
            [*e.results, *(e.stored.get(kept, kept) for kept in self._stored)]
            for e in (ends, self._base)
        )
        if len(values) != len(base):
            raise NotMerged
        return values, base

    def check(self, path: Path) -> None:
        """Raise NotMerged unless the choices lead to the operators of `path`."""
        ends = self._merge.add(path.graph)
        values, base = self._values(ends)
        answers = zip(path.taken, self._taken, strict=True)
        changed = {number for number, (one, other) in enumerate(answers) if one != other}

        def chosen(question: int, other: Any, value: Any) -> Any:
            return other() if question in changed else value()

        with deep_recursion():
            follow = self._follower(chosen)
            found = [follow(None, place, value) for place, value in enumerate(base)]
            asked = [follow(None, -1, question) for question in self._base.asked]
        if found != values or asked != ends.asked:
            raise NotMerged

    def finished(self) -> GraphModule:
        """The graph with all choices.

        Raises NotMerged if it does not run each batch norm as often as the base.
        """

        def chosen(question: int, other: Any, value: Any) -> Any:
            answers = other(), value()
            if not self._taken[question]:
                return self._merge.where(asked[question], *answers)
            return self._merge.where(asked[question], *reversed(answers))

        asked: list[Node] = []
        with deep_recursion():
            follow = self._follower(chosen)
            for question in self._base.asked:
                asked.append(follow(None, -1, question))
            _, base = self._values(self._base)
            values = [follow(None, place, value) for place, value in enumerate(base)]
        count = len(self._base.results)
        stored = dict(zip(self._stored, values[count:], strict=True))
        return self._merge.finished(Ends([], values[:count], stored), [self._base])

    def _follower(self, chosen: Callable[[int, Any, Any], Any]) -> Callable[..., Any]:
        """A function that computes the value of an argument of the base, with `chosen` values."""
        done = dict[Node, Node]()

        def follow(reader: Node | None, index: int, value: Any) -> Any:
            if not isinstance(value, Node):
                return value
            known = self._other.get((reader, index))
            if known is None:
                return read(value)
            return chosen(known[0], lambda: read(known[1]), lambda: read(value))

        def read(value: Node) -> Node:
            known = self._replaced.get(value)
            if known is None:
                return computed(value)
            chosen_value: Node = chosen(known[0], lambda: read(known[1]), lambda: computed(value))
            return chosen_value

        def computed(node: Node) -> Node:
            if node not in done:
                arguments = iter(
                    [follow(node, index, value) for index, value in enumerate(arguments_of(node))]
                )
                args, kwargs = map_arg((node.args, node.kwargs), lambda _: next(arguments))
                done[node] = self._merge.again(node, args, kwargs)
            return done[node]

        return follow


def compare(
    place: Place,
    one: Any,
    other: Any,
    base: Container[Node],
    found: dict[Place, tuple[Node, Node]],
    seen: set[tuple[Node, Node]],
) -> None:
    """Store in `found` the places at which a path and the base read different values.

    Args:
        place: The argument that is compared.
        one: What the path reads there.
        other: What the base reads there.
        base: The values of the base.
        found: Gets both values by place.
        seen: The pairs of values whose differences are noted.

    Raises:
        NotMerged: No graph can choose between the values.
    """
    if one is other or (not isinstance(one, Node) and one == other) or (one, other) in seen:
        return
    if not isinstance(one, Node) or not isinstance(other, Node):
        raise NotMerged
    # If the base also computes `one`, the path skips a layer here, so the choice is at this place.
    if one not in base and same_form(one, other):
        below = dict(found)
        with suppress(NotMerged):
            for index, (a, b) in enumerate(pairs(one, other)):
                compare((other, index), a, b, base, below, seen)
            found.update(below)
            seen.add((one, other))
            return
    if not alike(one, other) or found.get(place, (one, other)) != (one, other):
        raise NotMerged
    found[place] = one, other


def arguments_of(node: Node) -> list[Node]:
    """The nodes that `node` reads, each as often as it reads it."""
    return nodes_in((node.args, node.kwargs))
