"""Records models that divide batches, as ghost batch norms do. A recording keeps batches whole.

A batch on a device is so small that it is a single part. `check_whole` compares the recording with
the model for the largest batch of a training. In prediction, the division must not change the
results.
"""

import re
import sys
from typing import Any

import torch
from torch import SymInt, Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from exporters.programs import source_lines
from exporters.programs.recorded_graph import MINIMUM_BATCH
from exporters.programs.seeded_random import SeededBernoulli
from exporters.recording.captured import Captured
from exporters.recording.recording_comparison import check_graph, draws_of, random_samples
from profiles.errors import ModelError

DIVIDED = "line that divides batches"
"""The key in the `meta` of a graph."""
DIVIDES = re.compile(r"\b(chunk|split|tensor_split)\(|virtual|vbs|ghost", re.IGNORECASE)
"""Texts that a line contains if it divides batches."""
MORE = 4
"""The parts of predictions are checked for batches this many times as large."""


class SmallBatch(TorchFunctionMode):
    """Context in which the user's `line` reads the smallest number of samples as the batch size."""

    def __init__(self, line: str) -> None:
        super().__init__()
        self.line = line

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func`; change the shapes that the line reads."""
        result = func(*args, **(kwargs or {}))
        reads = func in (Tensor.shape.__get__, Tensor.size)  # type: ignore[attr-defined]
        if not reads or not isinstance(args[0], FakeTensor) or self.line != calling_line():
            return result
        if isinstance(result, SymInt):
            return MINIMUM_BATCH
        if isinstance(result, tuple):
            return torch.Size(MINIMUM_BATCH if isinstance(n, SymInt) else n for n in result)
        return result


def calling_line() -> str:
    """The user's line that is running. `running_line` is slower."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not source_lines.is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return source_lines.innermost([(frame.f_code.co_filename, frame.f_lineno)])


def check_whole(model: nn.Module, captured: Captured, largest: int) -> None:
    """Raise ModelError if `model` divides a batch of `largest` samples into several parts."""
    for graph, rows in ((captured.training, largest), (captured.inference, MORE * largest)):
        line = graph.meta.get(DIVIDED)
        if line is None:
            continue
        x = random_samples(captured, torch.Generator().manual_seed(0), rows)
        try:
            for draws in draws_of(graph) or [SeededBernoulli(0)]:
                check_graph(model, captured, graph, draws, x)
        except ModelError as error:
            raise ModelError(
                "The model divides a batch of {samples} samples into parts and normalises each "
                "part separately{place}; a recording keeps batches whole. Set a batch size such "
                "that a batch is one part, even if the last batch has one sample more. Or "
                "normalise the whole batch: self.bn(x).",
                code="model.fixed-batch",
                samples=rows,
                place=source_lines.parenthesized(line),
            ) from error
