"""From an `nn.Module` to ATen graphs that any family can count, cut and differentiate.

`torch.export` records the model twice, as it trains and as it predicts, with the batch size left
open. Parameters keep the names that they have in the model.
"""

import copy
import logging
import re
import warnings
from contextlib import redirect_stderr
from io import StringIO

import torch
from torch import nn
from torch._dynamo.exc import UserError, UserErrorType
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from device_agent.formats.manifest import Dtype
from exporters.programs import source_lines
from exporters.programs.captured import Captured
from exporters.programs.input_shapes import wrong_input_shape
from exporters.programs.interrupts import raise_if_interrupted
from exporters.programs.model_checks import (
    check_deterministic,
    check_faithful,
    check_kinds,
    check_output,
    check_parameters,
    check_sizes,
    check_writes,
    named_batch,
)
from exporters.programs.recorded_graph import (
    MINIMUM_BATCH,
    input_node,
    is_impure,
    is_integer_attribute,
    output_node,
)
from exporters.programs.tracing import DTYPES
from exporters.recurrence.lstm_recording import lstm_shapes_only
from exporters.recurrence.recurrent_layers import RECURRENT
from profiles.errors import ModelError

aten = torch.ops.aten
RESHAPING = ("view", "reshape", "slice", "select", "transpose", "permute", "unsqueeze", "squeeze")


def capture(model: nn.Module, sample_shape: tuple[int, ...]) -> Captured:
    """Record `model` for samples of `sample_shape` (without the batch).

    Samples are float32; a model with an embedding that takes none gets int64.

    Raises ModelError where the model cannot be recorded or is none that can be trained here:
    weights shared between modules, complex or integer parameters, all of them frozen, an output
    that is not (batch, classes).
    """
    check_parameters(model)
    try:
        training, dtype = record_either_way(model, sample_shape)
    except ModelError as error:
        explained = wrong_input_shape(model, sample_shape)
        if explained is None:
            raise
        raise explained from error
    inference = record(model, sample_shape, dtype, training=False)
    check_sizes(training)
    check_kinds(training)
    check_deterministic(training)
    check_writes(training)
    output = output_node(training).meta["val"]
    check_output(output, input_node(training).meta["val"].shape[0])
    captured = Captured(
        training=training,
        inference=inference,
        sample_shape=sample_shape,
        classes=int(output.shape[1]),
        parameters={n: v.detach() for n, v in model.named_parameters() if v.requires_grad},
        frozen={n: v.detach() for n, v in model.named_parameters() if not v.requires_grad},
        # Integer buffers only count batches; they are no part of the model's function. Buffers that
        # are not saved with the model are constants of the graph.
        buffers={
            name: v
            for name, v in model.named_buffers()
            if v.is_floating_point() and name in model.state_dict()
        },
        sample_dtype=dtype,
        sample_limit=smallest_table(training),
    )
    check_faithful(model, captured)
    return captured


def record_either_way(model: nn.Module, sample_shape: tuple[int, ...]) -> tuple[GraphModule, Dtype]:
    """The training graph, and the type of the samples that it takes."""
    try:
        return record(model, sample_shape, "float32", training=True), "float32"
    except ModelError:
        if not any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in model.modules()):
            raise
    return record(model, sample_shape, "int64", training=True), "int64"


def record(
    model: nn.Module, sample_shape: tuple[int, ...], dtype: Dtype, training: bool
) -> GraphModule:
    """ATen graph of `model` in one mode, over any batch of at least two samples."""
    try:
        twin = copy.deepcopy(model)
    except RuntimeError as error:
        raise ModelError(
            "The model cannot be copied, as where torch.nn.utils.weight_norm is used (take "
            f"torch.nn.utils.parametrizations.weight_norm): {error}"
        ) from error
    return recorded(twin.train(training), sample_shape, dtype)


def recorded(model: nn.Module, sample_shape: tuple[int, ...], dtype: Dtype) -> GraphModule:
    """ATen graph of `model` in the mode it is in. Raises ModelError where it has none."""
    batch = torch.export.Dim("batch", min=MINIMUM_BATCH)
    # What torch logs on the way to an exception, the exception says too.
    for noisy in ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    try:
        example = torch.zeros(MINIMUM_BATCH + 1, *sample_shape, dtype=DTYPES[dtype])
        # torch prints the graph so far on stderr when it gives up.
        with warnings.catch_warnings(), lstm_shapes_only(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            program = torch.export.export(
                model, (example,), dynamic_shapes=({0: batch},), strict=False
            )
    except GuardOnDataDependentSymNode as error:
        raise ModelError(
            "The model decides by the numbers that flow through it"
            f"{source_lines.of_error(error)}; it must compute the same for every batch. Choose "
            "with torch.where, or take the decision out of the model."
        ) from error
    except Exception as error:  # torch raises whatever the model's own code raises
        raise_if_interrupted(error)
        if isinstance(error, UserError) and error.error_type is UserErrorType.CONSTRAINT_VIOLATION:
            raise ModelError(some_batches_only(str(error))) from error
        reason = named_batch(source_lines.first_line(error))
        kind = "whole-number " if dtype == "int64" else ""
        fixed = (
            ". Write -1 for the batch in reshape and view." if "for input of size" in reason else ""
        )
        raise ModelError(
            f"The model cannot be recorded for {kind}samples of shape {sample_shape}: {reason}"
            f"{source_lines.of_error(error)}{fixed}"
        ) from error
    graph = program.module()
    assert isinstance(graph, GraphModule)
    return tidy(graph)


def some_batches_only(reason: str) -> str:
    """What to say of a model that takes batches of some sizes only; `reason` is torch's."""
    most = re.search(r"\.size\(\)\[0\] <= (\d+)", reason)
    if most is not None:
        return (
            f"The model computes otherwise for batches of more than {most[1]} samples, as "
            "torch.cdist does; one recording must serve all. Write distances as sums of squared "
            "differences, and decide nothing by len(x) or x.shape[0]."
        )
    return (
        "The model cannot be recorded for batches of any size, only for some: its code fixes or "
        "asks how many samples there are. Write -1 for the batch in reshape and view, and decide "
        "nothing by len(x) or x.shape[0]."
    )


def tidy(graph: GraphModule) -> GraphModule:
    """Drop input guards and batch counters, which are no part of the model's function.

    Zeros that recurrent layers start from get their weights' type, so that float64 runs too.
    """
    for node in reversed(list(graph.graph.nodes)):
        if node.target in RECURRENT:
            retype_zeros(graph, node)
        if node.target is aten.dropout.default and node.args[1] == 0:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
            continue
        guard = node.op == "call_module" and node.target == "_guards_fn"
        counter = is_counter(graph, node)
        if guard or counter:
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code(is_impure_node=is_impure)
    graph.recompile()
    return graph


def retype_zeros(graph: GraphModule, recurrent: Node) -> None:
    """Let zero states of the layer `recurrent` follow its weights' type instead of float32."""
    states, weights = recurrent.args[1:3]
    for zeros in states if isinstance(states, list | tuple) else [states]:
        if isinstance(zeros, Node) and zeros.target is aten.zeros.default:
            with graph.graph.inserting_before(zeros):
                twin = graph.graph.call_function(
                    aten.new_zeros.default,
                    (weights[0], zeros.args[0]),  # type: ignore[index]
                )
            twin.meta = dict(zeros.meta)
            zeros.replace_all_uses_with(twin)


def is_counter(graph: GraphModule, node: Node) -> bool:
    """Whether `node` counts a batch, in an integer buffer or after another count in it."""
    if node.target is not aten.add_.Tensor:
        return False
    counted = node.args[0]
    return is_integer_attribute(graph, counted) or (
        isinstance(counted, Node) and is_counter(graph, counted)
    )


def smallest_table(graph: GraphModule) -> int | None:
    """Rows of the smallest embedding that the samples index as they are, None without one."""
    raw = {input_node(graph)}
    rows = []
    for node in graph.graph.nodes:
        if node.op != "call_function" or not raw & set(node.all_input_nodes):
            continue
        if node.target is aten.embedding.default and node.args[1] in raw:
            rows.append(int(node.args[0].meta["val"].shape[0]))
        if any(f"aten.{word}." in str(node.target) for word in RESHAPING):
            raw.add(node)
    return min(rows, default=None)
