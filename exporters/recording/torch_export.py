"""Runs `torch.export` on a user's code, a model or a loss. Errors name what stops the recording."""

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO

import torch
from torch import Tensor, nn
from torch._dynamo.exc import UserError, UserErrorType
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from exporters.programs import source_lines
from exporters.programs.interrupts import raise_if_interrupted
from exporters.programs.recorded_graph import MINIMUM_BATCH
from exporters.programs.torch_internals import lines_of_users, without_layouts
from exporters.recording.fixed_sizes import FixedSizes
from exporters.recording.model_checks import check_vmap
from exporters.recording.random_draws import (
    RandomDraws,
    decides_at_random,
    draws_outside_torch,
)
from exporters.recording.replacements.complex_context import ComplexPairs
from exporters.recording.replacements.custom_gradients import recorded_functions
from exporters.recording.replacements.fourier import FOURIER
from exporters.recording.replacements.index_forms import integers_stay_tensors
from exporters.recording.replacements.recorded_forms import FORMS
from exporters.recording.replacements.replaced_functions import replaced_functions
from exporters.recording.replacements.symbolic_length import symbolic_len
from exporters.recording.replacements.uniform_draws import uniform_draws
from exporters.recurrence.lstm_recording import lstm_shapes_only
from profiles.errors import EdgeTailorError, ModelError


@contextmanager
def recording_context() -> Iterator[None]:
    """Context in which functions of torch are recorded as operators that both formats have."""
    # These loggers only repeat what the exception says.
    for noisy in ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    # torch prints the unfinished graph to stderr when it fails.
    with (
        warnings.catch_warnings(),
        lstm_shapes_only(),
        redirect_stderr(StringIO()),
        without_layouts(),
        lines_of_users(),
        integers_stay_tensors(),
        replaced_functions(),
        recorded_functions(),
        uniform_draws(FORMS | FOURIER, ComplexPairs),
    ):
        warnings.simplefilter("ignore")
        yield


def exported(module: nn.Module, *example: Tensor) -> GraphModule:
    """The ATen graph of `module` for any number of rows of the `example`.

    Raises:
        ModelError: No graph can express the code, and the reason is known. Other errors of the code
            and of torch are raised unchanged.
    """
    batch = torch.export.Dim("batch", min=MINIMUM_BATCH)
    draws, sizes = RandomDraws(), FixedSizes()
    try:
        with recording_context(), symbolic_len(module), sizes, draws:
            program = torch.export.export(
                module, example, dynamic_shapes=tuple({0: batch} for _ in example), strict=False
            )
    except (GuardOnDataDependentSymNode, DataDependentOutputException) as error:
        if draws.line:
            raise decides_at_random(draws.line) from error
        raise ModelError(
            "The model's Python code reads values that it computes from the samples{place}; it "
            "must run the same operators for every batch. Choose with torch.where, or move the "
            "decision out of the model.",
            code="model.data-dependent-code",
            place=source_lines.place_of_error(error),
        ) from error
    except Exception as error:  # the user's code may raise any error
        raise_if_interrupted(error)
        if isinstance(error, EdgeTailorError):  # from joined inputs or replaced functions
            raise
        if draws.outside_torch():
            raise draws_outside_torch() from error
        if isinstance(error, UserError) and error.error_type is UserErrorType.CONSTRAINT_VIOLATION:
            raise fixed_batch_error(str(error), sizes.line) from error
        raise
    if draws.outside_torch():
        raise draws_outside_torch()
    graph = program.module()
    assert isinstance(graph, GraphModule)
    check_vmap(graph)
    return graph


def fixed_batch_error(reason: str, line: str) -> ModelError:
    """The error for a model that takes only some batch sizes.

    Args:
        reason: Torch's message.
        line: The user's line that turned the number of samples into an integer; or empty.
    """
    limit = re.search(r"\.size\(\)\[0\] <= (\d+)", reason)
    if limit is not None:
        return ModelError(
            "The model computes differently for batches of more than {limit} samples; one "
            "recording must serve all batch sizes. Do not branch on x.shape[0], and write to no "
            "tensor of {limit} samples, such as a cache for predictions.",
            code="model.fixed-batch",
            limit=int(limit[1]),
        )
    return ModelError(
        "The model can be recorded only for some batch sizes: its code fixes or reads the number "
        "of samples{place}. {remedy}",
        code="model.fixed-batch",
        place=source_lines.parenthesized(line),
        remedy=remedy_for(line),
    )


def remedy_for(line: str) -> str:
    """What to write in place of the user's `line`, which turns a batch size into an integer."""
    if re.search(r"\b(chunk|split|tensor_split)\(", line):
        return (
            "Do not divide a batch into parts. A device's batch is small, so a ghost batch norm is "
            "a batch norm of the whole batch: self.bn(x)."
        )
    if re.search(r"\]\s*\*", line):
        return "Write x.expand(n, ...) or x.repeat(n, ...) in place of a list of copies."
    return (
        "In reshape and view, write -1 for the batch. Elsewhere, write x.shape[0], and do not "
        "branch on it or loop over it."
    )
