"""Records every path through Python code that decides by values.

During a recording, values are not known. So code with `if x.abs().max() > 100:` is recorded twice,
once for each answer, and the recordings are merged (see `merged_paths.py`).
"""

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode

from exporters.programs import source_lines
from exporters.programs.interrupts import raise_if_interrupted

LARGEST_NUMBER = 64
"""A model with more paths than this is refused. A loop has a path for each number of iterations."""
MOST_CHOICES = 5
"""Code has too many paths if it asks more questions than this on both the first and the opposite
path."""
LARGEST_SIZE = 20_000
"""A model whose paths together have more operators than this is refused."""
MARK = "decision of the model"
"""The message of the operators that mark the values by which the code decides."""
RANGE = "possible_numbers"
"""The attribute with the `range` of a drawn whole number, which Python code may use like an
integer."""
ASSERT = torch.ops.aten._assert_async.msg
ASSERTION = re.compile(r": assert (?P<no>not )?(?!.*\b(and|or|if)\b)")
"""A line of a user that asserts one answer."""


class TooManyPaths(Exception):  # noqa: N818 - users never see it
    """There are too many paths through a model's code.

    Attributes:
        line: The user's line with the first decision.
        alike: The recordings of two paths, if these paths end: the path with only the answer no,
            and the path with only the answer yes.
    """

    def __init__(self, line: str, alike: "tuple[Path, ...]" = ()) -> None:
        super().__init__(line)
        self.line, self.alike = line, alike


class Decisions(TorchFunctionMode):
    """Context that answers the questions that Python's code asks about unknown values.

    Inside the context, `.item()` returns a tensor with one number.

    Args:
        given: The answers to the first questions.
        further: The answer to all further questions.

    Attributes:
        taken: All answers.
        lines: The user's line of each question.
    """

    def __init__(self, given: tuple[bool, ...], further: bool = False) -> None:
        super().__init__()
        self.given, self.further = given, further
        self.taken, self.lines = list[bool](), list[str]()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func`; answer if it asks for a yes or no."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if not args or not isinstance(args[0], FakeTensor):
            return func(*args, **kwargs)
        if name == "item" and is_single(args[0]):
            return args[0].detach().clone().reshape(())
        if name in ("__bool__", "is_nonzero") and is_single(args[0]):
            return self._answer(args[0])
        if name == "equal":
            other = kwargs["other"] if "other" in kwargs else args[1]
            return args[0].shape == other.shape and self._answer((args[0] == other).all())
        if name == "allclose":
            return self._answer(torch.isclose(*args, **kwargs).all())
        if name == "__index__" and (numbers := getattr(args[0], RANGE, None)):
            *others, last = numbers
            return next((n for n in others if self._answer(args[0] == n)), last)
        return func(*args, **kwargs)

    def _answer(self, question: Tensor) -> bool:
        """The answer to `question`, a tensor of one element; it marks the operator."""
        line = source_lines.running_line()
        if asserted := ASSERTION.search(line):
            return not asserted["no"]  # the other answer raises an error, so its path is left out
        number = len(self.taken)
        self.lines.append(line)
        if number >= LARGEST_NUMBER:
            raise TooManyPaths(self.lines[0])
        asked = question.detach().reshape(())
        ASSERT(asked if asked.dtype == torch.bool else asked != 0, MARK)
        self.taken.append(self.given[number] if number < len(self.given) else self.further)
        return self.taken[-1]


@dataclass(frozen=True)
class Path:
    """One path through the code.

    Attributes:
        taken: The answers.
        graph: The recording.
    """

    taken: tuple[bool, ...]
    graph: GraphModule


def all_paths(module: nn.Module, record: Callable[[Decisions], GraphModule]) -> list[Path]:
    """Record `module` once for each path through its code.

    If the user's code raises an error on a path, the path is left out: a model is not trained with
    samples that it refuses.

    Args:
        module: The module that `record` records. Its attributes are reset before each run.
        record: Records the module with these decisions. The graph must have no writes in place.

    Raises:
        TooManyPaths: There are too many paths.
        Exception: The error that `record` raises for a path. If all paths end in errors of the
            user's code, the first error is raised.
    """
    paths, waiting, size = list[Path](), [tuple[bool, ...]()], 0
    first: Exception | None = None
    while waiting:
        decisions = Decisions(waiting.pop())
        try:
            with same_attributes(module):
                graph = record(decisions)
            if decisions.taken and not decisions.given:
                check_opposite(module, record, Path(tuple(decisions.taken), graph))
        except Exception as error:  # the user's code may raise any error
            raise_if_interrupted(error)
            if not decisions.taken or not source_lines.is_raised_by_user(error):
                raise
            first = first or error
        else:
            paths.append(Path(tuple(decisions.taken), graph))
            size += len(graph.graph.nodes)
        taken = tuple(decisions.taken)
        waiting += [(*taken[:n], True) for n in range(len(decisions.given), len(taken))]
        if waiting and (len(paths) + len(waiting) > LARGEST_NUMBER or size > LARGEST_SIZE):
            raise TooManyPaths(decisions.lines[0])
    if not paths:
        assert first is not None
        raise first
    return paths


def check_opposite(
    module: nn.Module, record: Callable[[Decisions], GraphModule], first: Path
) -> None:
    """Record once with the answer yes to all choices, to detect too many paths early.

    There are too many paths if a loop has no end, or because n independent choices have 2^n paths.
    `first` is the path on which all answers are no.

    Raises:
        TooManyPaths: There are too many paths.
    """
    decisions, paths = Decisions((), further=True), [first]
    with suppress(Exception), same_attributes(module):  # errors are reported for their own path
        graph = record(decisions)
        paths.append(Path(tuple(decisions.taken), graph))
    asked = min(len(first.taken), len(decisions.taken))
    if len(decisions.lines) > LARGEST_NUMBER or asked > MOST_CHOICES:
        raise TooManyPaths(decisions.lines[0], tuple(paths))


def is_single(x: Tensor) -> bool:
    """Whether `x` has one element for every batch size."""
    return all(isinstance(size, int) and size == 1 for size in x.shape)


def marked(node: Node) -> bool:
    """Whether `node` marks a value by which the code decides."""
    return node.target is ASSERT and node.args[1] == MARK


@contextmanager
def same_attributes(module: nn.Module) -> Iterator[None]:
    """Context that restores the attributes of `module` and of the modules inside it at the end.

    The code may count its calls, for example.
    """
    before = [
        (part, {name: shallow(value) for name, value in vars(part).items()})
        for part in module.modules()
    ]
    try:
        yield
    finally:
        for part, attributes in before:
            vars(part).clear()
            vars(part).update(attributes)


def shallow(value: Any) -> Any:
    """A copy of a list, a dictionary or a set. Other values are returned unchanged."""
    return copy.copy(value) if isinstance(value, list | dict | set) else value
