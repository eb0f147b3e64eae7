"""Records an `nn.Module` as ATen graphs that every family can count, cut and differentiate.

`torch.export` records the model twice, in training and in inference mode, for any batch size.
Parameters keep the names that they have in the model.
"""

from contextvars import ContextVar

import torch
from torch import nn
from torch.fx import GraphModule

from device_agent.formats.manifest import Dtype
from exporters.programs import source_lines
from exporters.programs.garbage_collection import rare_collections
from exporters.programs.interrupts import raise_if_interrupted
from exporters.programs.output_parts import PREFERRED, described_parts
from exporters.programs.recorded_graph import (
    MINIMUM_BATCH,
    input_node,
    names_of_kept_values,
    output_node,
)
from exporters.programs.sample_ranges import describe_input
from exporters.programs.tracing import DTYPES
from exporters.recording.captured import Captured
from exporters.recording.fixed_draws import fix_draws
from exporters.recording.fixed_sizes import shape_remedy
from exporters.recording.graph_cleanup import clean_up
from exporters.recording.inputs.input_ranges import checked_range, input_range_of
from exporters.recording.inputs.input_shapes import wrong_input_shape
from exporters.recording.inputs.packed_inputs import check_one_input, parts_of_model, with_limits
from exporters.recording.model_checks import (
    check_deterministic,
    check_operators,
    check_output,
    check_parameters,
    check_sizes,
    check_writes,
    name_batch,
)
from exporters.recording.model_output import OutputForm, return_packed_output
from exporters.recording.parameter_writes import take_out_writes
from exporters.recording.recording_comparison import check_recording
from exporters.recording.replacements.custom_gradients import custom_gradient, own_gradients
from exporters.recording.shared_tensors import (
    first_names,
    kept_tensors,
    tensors_by_all_names,
    twin_of,
)
from exporters.recording.torch_export import exported
from profiles.errors import EdgeTailorError, ModelError

aten = torch.ops.aten
# Operators that keep the samples' values, so that an embedding after them still reads samples.
RESHAPING = (
    *("view", "reshape", "slice", "select", "transpose", "permute", "unsqueeze", "squeeze"),
    *("contiguous", "flatten", "unflatten"),
)


class SharedRecording:
    """The recording of one model for one shape of samples, shared by several families.

    Inside a `with` block of this object, only the first call of `capture` records the model. The
    model must not change while the object is in use.

    Args:
        model: The model.
        sample_shape: Shape of one sample, without the batch.

    Examples:
        >>> model = nn.Linear(3, 2)
        >>> with SharedRecording(model, (3,)):
        ...     capture(model, (3,)) is capture(model, (3,))
        True
    """

    def __init__(self, model: nn.Module, sample_shape: tuple[int, ...]) -> None:
        self._model, self._shape = model, sample_shape
        self._captured: Captured | None = None

    def __enter__(self) -> None:
        _SHARED.set((*_SHARED.get(), self))

    def __exit__(self, *error: object) -> None:
        _SHARED.set(_SHARED.get()[:-1])

    def of(self, model: nn.Module, sample_shape: tuple[int, ...]) -> Captured | None:
        """The recording of `model`; None if this object is for another model or shape."""
        if self._model is not model or self._shape != sample_shape:
            return None
        if self._captured is None:
            self._captured = record_and_check(model, sample_shape)
        return self._captured


_SHARED: ContextVar[tuple[SharedRecording, ...]] = ContextVar("shared recordings", default=())


def capture(model: nn.Module, sample_shape: tuple[int, ...]) -> Captured:
    """Record `model` in training and in inference mode, and check both graphs.

    Samples are float32. If a model with an embedding cannot be recorded for float32 samples, it is
    recorded for int64 samples.

    Args:
        model: The model; it is copied and stays unchanged.
        sample_shape: Shape of one sample, without the batch.

    Returns:
        Both graphs and the model's tensors, under the names that they have in the model. A tensor
        with several names appears under the first.

    Raises:
        ModelError: The model cannot be recorded or cannot be trained here; for example, parameters
            are complex, integer or all frozen, or the output is not one float32 tensor with the
            batch as its first axis.
    """
    for shared in _SHARED.get():
        known = shared.of(model, sample_shape)
        if known is not None:
            return known
    return record_and_check(model, sample_shape)


def record_and_check(model: nn.Module, sample_shape: tuple[int, ...]) -> Captured:
    """Record and check `model`. Raises ModelError like `capture`.

    If the gradients differ, the model is recorded again with the gradients that its own functions
    define.
    """
    check_one_input(model)
    try:
        return recorded_once(model, sample_shape)
    except ModelError as error:
        if error.code != "model.recording-differs":
            raise
        first = error
    with own_gradients() as calls:
        try:
            return recorded_once(model, sample_shape)
        except ModelError as error:
            raise (custom_gradient(calls[0]) if calls else first) from error


@rare_collections()
def recorded_once(model: nn.Module, sample_shape: tuple[int, ...]) -> Captured:
    """Record `model` once, and check the recording. Raises ModelError like `capture`."""
    check_parameters(model)
    try:
        (training, in_training), dtype = record_training(model, sample_shape)
    except ModelError as error:
        # Code that decides by values is not run: its loops might never end for zeros.
        decides = error.code.startswith("model.data-dependent")
        explained = None if decides else wrong_input_shape(model, sample_shape)
        if explained is None:
            raise
        raise explained from error
    # The tables that the graph indexes show how many ids there are.
    with_limits(model, training)
    describe_input(training, input_range_of(model), parts_of_model(model))
    inference, outputs = record_outputs(model, sample_shape, dtype, training=False)
    if in_training.parts != outputs.parts:
        only = output_in_both(in_training, outputs)
        training, _ = record_outputs(model, sample_shape, dtype, training=True, only=only)
        describe_input(training, input_range_of(model), parts_of_model(model))
        others = [part.name for part in in_training.parts if part.name != only]
        left_out = dict.fromkeys(others, "it is returned only in training")
        outputs = OutputForm(outputs.parts, left_out, only)
    input_range = checked_range(model, sample_shape, dtype)
    for graph in (training, inference):
        check_sizes(graph)
        check_operators(graph)
    check_deterministic(training, inference)
    for graph in (training, inference):
        take_out_writes(graph, [n for n, v in model.named_parameters() if v.requires_grad])
    check_writes(training, inference, kept_tensors(model))
    output = output_node(training).meta["val"]
    check_output(output, input_node(training).meta["val"].shape[0])
    first, saved = first_names(tensors_by_all_names(model)), model.state_dict()
    frozen = {n: v.detach() for n, v in model.named_parameters() if not v.requires_grad}
    averaged = frozen.keys() & set(names_of_kept_values(training))
    captured = Captured(
        training=training,
        inference=inference,
        sample_shape=sample_shape,
        output_shape=tuple(int(size) for size in output.shape[1:]),
        parameters={n: v.detach() for n, v in model.named_parameters() if v.requires_grad},
        frozen={n: v for n, v in frozen.items() if n not in averaged},
        # Integer buffers only count batches; the model's function does not depend on them. Buffers
        # that are not saved with the model are constants of the graph. Frozen parameters that the
        # model itself changes, such as averages of other parameters, are state like buffers.
        buffers={
            name: v
            for name, v in model.named_buffers()
            if v.is_floating_point() and name in saved and first[name] == name
        }
        | {name: value for name, value in frozen.items() if name in averaged},
        sample_dtype=dtype,
        sample_limit=smallest_embedding(training),
        input_range=input_range,
        parts=parts_of_model(model),
        outputs=outputs,
    )
    check_recording(model, captured)
    fix_draws(inference)
    return captured


def output_in_both(in_training: OutputForm, in_inference: OutputForm) -> str:
    """Choose the training output of a model that returns a single tensor in inference.

    Networks with auxiliary outputs return several outputs in training. The chosen output is
    `logits`, or else the first output.

    Raises:
        ModelError: This output does not have the shape of the output in inference.
    """
    names = [part.name for part in in_training.parts]
    name = PREFERRED if PREFERRED in names else next(iter(names), "")
    shapes = {part.name: part.shape for part in in_training.parts}
    if len(in_inference.parts) != 1 or shapes.get(name) != in_inference.parts[0].shape:
        raise ModelError(
            "The model returns {training} in training and {inference} in inference. Return the "
            "same outputs in both, without `if self.training`.",
            code="model.outputs-by-mode",
            training=described_parts(in_training.parts),
            inference=described_parts(in_inference.parts),
        )
    return name


def record_training(
    model: nn.Module, sample_shape: tuple[int, ...]
) -> tuple[tuple[GraphModule, OutputForm], Dtype]:
    """Record training, with samples of float32, or of int64 if an embedding needs it."""
    try:
        return record_outputs(model, sample_shape, "float32", training=True), "float32"
    except ModelError as error:
        if not any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in model.modules()):
            raise
        first = error
    try:
        return record_outputs(model, sample_shape, "int64", training=True), "int64"
    except ModelError:
        # If float32 samples reach an embedding, PyTorch's message mentions "indices".
        if "indices" in str(first):
            raise
        raise first from None


def record(
    model: nn.Module, sample_shape: tuple[int, ...], dtype: Dtype, training: bool
) -> GraphModule:
    """Record `model` as `record_outputs` does, and return the graph alone."""
    return record_outputs(model, sample_shape, dtype, training)[0]


def record_outputs(
    model: nn.Module,
    sample_shape: tuple[int, ...],
    dtype: Dtype,
    training: bool,
    only: str | None = None,
) -> tuple[GraphModule, OutputForm]:
    """Record a copy of `model` in training or inference mode as an ATen graph.

    The copy shares its parameters with `model`, because recording reads no values.

    Args:
        model: The model; it stays unchanged.
        sample_shape: Shape of one sample, without the batch.
        dtype: Type of the samples.
        training: Whether to record the model in training mode.
        only: Name of the output to record; all if None.

    Returns:
        A graph for any batch of at least two samples, and the outputs that it returns packed.

    Raises:
        ModelError: The model cannot be copied or recorded.
    """
    try:
        twin = twin_of(model)
    except Exception as error:  # an attribute may be anything
        raise ModelError(
            "The model cannot be copied ({reason}). Its attributes must be modules, parameters, "
            "buffers and plain values; give it a method __deepcopy__ if it holds anything else.",
            code="model.cannot-copy",
            reason=source_lines.first_line(error),
        ) from error
    forms = return_packed_output(twin, only)
    graph = record_current_mode(twin.train(training), sample_shape, dtype)
    return graph, forms[-1]


def record_current_mode(
    model: nn.Module, sample_shape: tuple[int, ...], dtype: Dtype
) -> GraphModule:
    """ATen graph of `model` in its current mode. Raises ModelError if it cannot be recorded."""
    try:
        example = torch.zeros(MINIMUM_BATCH + 1, *sample_shape, dtype=DTYPES[dtype])
        changed = kept_tensors(model) | {name for name, _ in model.named_parameters()}
        graph = exported(model, changed, example)
    except EdgeTailorError:
        raise
    except Exception as error:  # the model's own code may raise any error
        raise_if_interrupted(error)
        reason = name_batch(source_lines.first_line(error))
        kind = "int64 " if dtype == "int64" else ""
        raise ModelError(
            "The model cannot be recorded for {kind}samples of shape {shape}: "
            "{reason}{place}{remedy}",
            code="model.cannot-record",
            shape=sample_shape,
            dtype=dtype,
            kind=kind,
            reason=reason,
            place=source_lines.place_of_error(error),
            remedy=shape_remedy(reason),
        ) from error
    clean_up(graph)
    describe_input(graph, input_range_of(model), parts_of_model(model))
    return graph


def smallest_embedding(graph: GraphModule) -> int | None:
    """The number of rows of the smallest embedding that samples index directly, or None."""
    unchanged = {input_node(graph)}
    rows = []
    for node in graph.graph.nodes:
        if node.op != "call_function" or not unchanged & set(node.all_input_nodes):
            continue
        if node.target is aten.embedding.default and node.args[1] in unchanged:
            rows.append(int(node.args[0].meta["val"].shape[0]))
        if any(f"aten.{word}." in str(node.target) for word in RESHAPING):
            unchanged.add(node)
    return min(rows, default=None)
