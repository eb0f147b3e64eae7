"""Runs `torch.export` on a user's model or loss. Errors name the code that stops the recording."""

import logging
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from io import StringIO

import torch
from torch import Tensor, nn
from torch._dynamo.exc import UserError, UserErrorType
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode

from exporters.programs import source_lines
from exporters.programs.interrupts import raise_if_interrupted
from exporters.programs.recorded_graph import MINIMUM_BATCH
from exporters.programs.torch_internals import lines_of_users, without_layouts
from exporters.recording.choices.decisions import (
    LARGEST_NUMBER,
    LARGEST_SIZE,
    Decisions,
    TooManyPaths,
    all_paths,
)
from exporters.recording.choices.independent_choices import independent_choices
from exporters.recording.choices.merged_paths import NotMerged, merged
from exporters.recording.functional_form import make_functional
from exporters.recording.graph_checks import check_vmap, reads_number
from exporters.recording.graph_cleanup import inline_regions, use_first_names
from exporters.recording.known_values import KnownValues
from exporters.recording.random_draws import (
    RandomDraws,
    decides_at_random,
    draws_outside_torch,
    line_of_draw,
)
from exporters.recording.replacements.assigned_buffers import assignments_write
from exporters.recording.replacements.complex_numbers.complex_context import ComplexPairs
from exporters.recording.replacements.complex_numbers.fourier import FOURIER
from exporters.recording.replacements.custom_gradients import recorded_functions
from exporters.recording.replacements.function_forms.index_forms import integers_stay_tensors
from exporters.recording.replacements.function_forms.recorded_forms import FORMS
from exporters.recording.replacements.inner_gradients import GRADIENTS, compute_gradients
from exporters.recording.replacements.masks.boolean_masks import MaskedValues
from exporters.recording.replacements.python_code.numpy_arrays import numpy_arrays
from exporters.recording.replacements.python_code.python_draws import python_draws
from exporters.recording.replacements.python_code.python_functions import python_functions
from exporters.recording.replacements.random_functions import uniform_draws
from exporters.recording.replacements.replaced_functions import replaced_functions
from exporters.recording.shared_tensors import tensors_by_all_names
from exporters.recording.sizes.cut_sequences import CUTS, CutSequences
from exporters.recording.sizes.fixed_sizes import FixedSizes, fixed_batch_error
from exporters.recurrence.lstm_recording import lstm_shapes_only
from profiles.errors import EdgeTailorError, ModelError


@contextmanager
def recording_context() -> Iterator[None]:
    """Context in which functions of torch are recorded as operators that both formats have."""
    # These loggers only repeat the message of the exception.
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
        assignments_write(),
        replaced_functions(),
        recorded_functions(),
        uniform_draws(FORMS | FOURIER | GRADIENTS, ComplexPairs),
    ):
        warnings.simplefilter("ignore")
        yield


def exported(
    module: nn.Module,
    kept: Collection[str],
    *example: Tensor,
    mode: TorchFunctionMode | None = None,
) -> GraphModule:
    """The ATen graph of `module` for any number of rows of the `example`.

    The graph writes in place only into own tensors of the module. If the code decides by values,
    the graph computes all paths and selects one result.

    Args:
        module: The module. It stays unchanged.
        kept: The names of the own tensors that may change.
        example: Example inputs of the module.
        mode: A further context for the code.

    Raises:
        ModelError: A graph cannot represent the code, and the reason is known. Other errors of the
            code and of torch are raised unchanged.
    """
    draws, sizes, values = RandomDraws(module), FixedSizes(), KnownValues(module)
    cuts, more = CutSequences(), [] if mode is None else [mode]
    lines: list[str] = []

    def record(decisions: Decisions) -> GraphModule:
        graph = traced(
            module, example, [draws, decisions, values, MaskedValues(), cuts, *more], sizes, draws
        )
        graph.meta[CUTS] = cuts.lines
        lines.extend(decisions.lines)
        use_first_names(graph, tensors_by_all_names(module))
        inline_regions(graph)
        make_functional(graph, kept)
        compute_gradients(graph)
        return graph

    state = set(tensors_by_all_names(module))
    try:
        paths = all_paths(module, record)
        return merged(paths, state) if lines else paths[0].graph
    except TooManyPaths as error:
        independent = independent_choices(error.alike, module, record, state)
        if independent is not None:
            return independent
        if draws.line:
            raise decides_at_random(draws.line) from error
        raise ModelError(
            "The model's Python code branches on values{place}, and there are too many paths "
            "through the code: more than {limit}, or more than {size:,} operators. Choose with "
            "torch.where, and give loops a fixed number of iterations.",
            code="model.data-dependent-code",
            place=source_lines.parenthesized(error.line),
            limit=LARGEST_NUMBER,
            size=LARGEST_SIZE,
        ) from error
    except NotMerged as error:
        raise ModelError(
            "The model's Python code branches on values that it computes from the samples{place}, "
            "and a graph cannot choose between the results. Return results of the same shape from "
            "both branches and run the same batch norms in both, or choose with torch.where.",
            code="model.data-dependent-code",
            place=source_lines.parenthesized(lines[0]),
        ) from error
    except (GuardOnDataDependentSymNode, DataDependentOutputException) as error:
        place = source_lines.place_of_error(error)
        if values.number and place == source_lines.parenthesized(values.number):
            raise reads_number(place) from error
        raise ModelError(
            "The model's Python code reads values that it computes from the samples{place}; it "
            "must run the same operators for every batch. Choose with torch.where, or move the "
            "decision out of the model.",
            code="model.data-dependent-code",
            place=place,
        ) from error


def traced(
    module: nn.Module,
    example: tuple[Tensor, ...],
    modes: Sequence[TorchFunctionMode],
    sizes: FixedSizes,
    draws: RandomDraws,
) -> GraphModule:
    """Run torch.export once, in these `modes`. Raises errors like `exported`."""
    batch = torch.export.Dim("batch", min=MINIMUM_BATCH)

    def record() -> torch.export.ExportedProgram:
        functions = (
            recording_context(),
            python_functions(module),
            python_draws(module),
            numpy_arrays(),
        )
        with ExitStack() as stack:
            for context in (*functions, sizes.noting()):
                stack.enter_context(context)
            for mode in modes:
                stack.enter_context(mode)
            return torch.export.export(
                module, example, dynamic_shapes=tuple({0: batch} for _ in example), strict=False
            )

    try:
        program = record()
    except (GuardOnDataDependentSymNode, DataDependentOutputException):
        raise
    except Exception as error:  # the user's code may raise any error
        raise_if_interrupted(error)
        if isinstance(error, EdgeTailorError):  # from joined inputs or replaced functions
            raise
        if draws.outside_torch():
            raise draws_outside_torch(line_of_draw(record)) from error
        if sizes.line and isinstance(error, AssertionError | ValueError):  # of the model's code
            raise fixed_batch_error("", sizes.line) from error
        if isinstance(error, UserError) and error.error_type is UserErrorType.CONSTRAINT_VIOLATION:
            raise fixed_batch_error(str(error), sizes.line or sizes.undecided) from error
        raise
    if draws.outside_torch():
        raise draws_outside_torch(line_of_draw(record))
    graph = program.module()
    assert isinstance(graph, GraphModule)
    check_vmap(graph)
    return graph
