"""Records an `nn.Module` as ATen graphs that every family can count, cut and differentiate.

`torch.export` records the model twice, in training and in inference mode, for any batch size.
Parameters keep the names that they have in the model.
"""

import re
from collections.abc import Collection, Sequence
from contextvars import ContextVar
from dataclasses import replace

import torch
from torch import Tensor, nn
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
from exporters.recording.graph_checks import (
    check_deterministic,
    check_operators,
    check_sizes,
    check_writes,
)
from exporters.recording.graph_cleanup import clean_up
from exporters.recording.inputs.input_ranges import checked_range, input_range_of
from exporters.recording.inputs.input_shapes import wrong_input_shape
from exporters.recording.inputs.packed_inputs import check_one_input, parts_of_model, with_limits
from exporters.recording.model_checks import check_output, check_parameters, name_batch
from exporters.recording.model_output import OutputForm, names_in_both, return_packed_output
from exporters.recording.parameter_writes import take_out_writes
from exporters.recording.recording_comparison import check_recording, check_rows
from exporters.recording.replacements.custom_gradients import custom_gradient, own_gradients
from exporters.recording.shared_tensors import (
    first_names,
    kept_tensors,
    tensors_by_all_names,
    twin_of,
)
from exporters.recording.sizes.cut_check import check_cuts
from exporters.recording.sizes.divided_batches import DIVIDED, DIVIDES, SmallBatch
from exporters.recording.sizes.fixed_sizes import shape_remedy
from exporters.recording.torch_export import exported
from profiles.errors import EdgeTailorError, ModelError

aten = torch.ops.aten
# Operators that keep the samples' values, so that an embedding after them still reads samples.
RESHAPING = (
    *("view", "reshape", "slice", "select", "transpose", "permute", "unsqueeze", "squeeze"),
    *("contiguous", "flatten", "unflatten"),
)

MAKES_LAYER = re.compile(r"\b(Linear|Conv\d?d?|LSTM|GRU|Embedding|BatchNorm\d?d?|Parameter)\(")
MADE_LAYER = (
    ". A recording cannot make a layer: make it in __init__, or run the model once on a batch in "
    "the function that makes the model."
)


class SharedRecording:
    """The recording of one model for one shape of samples. Several families can share it.

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
        self._captured: dict[bool, Captured] = {}

    def __enter__(self) -> None:
        _SHARED.set((*_SHARED.get(), self))

    def __exit__(self, *error: object) -> None:
        _SHARED.set(_SHARED.get()[:-1])

    def of(
        self, model: nn.Module, sample_shape: tuple[int, ...], own_loss: bool
    ) -> Captured | None:
        """The recording of `model`. None if this object is for another model or shape."""
        if self._model is not model or self._shape != sample_shape:
            return None
        if own_loss not in self._captured:
            self._captured[own_loss] = record_and_check(model, sample_shape, own_loss)
        return self._captured[own_loss]


_SHARED: ContextVar[tuple[SharedRecording, ...]] = ContextVar("shared recordings", default=())


def capture(model: nn.Module, sample_shape: tuple[int, ...], own_loss: bool = False) -> Captured:
    """Record `model` in training and in inference mode, and check both graphs.

    Samples are float32. But if a model with an embedding cannot be recorded for float32 samples, it
    is recorded for int64 samples.

    Args:
        model: The model. It is copied and stays unchanged.
        sample_shape: Shape of one sample, without the batch.
        own_loss: Whether the user's own loss takes everything that the model returns.

    Returns:
        Both graphs and the model's tensors, under their names in the model. A tensor with several
        names has the first of these names.

    Raises:
        ModelError: The model cannot be recorded or cannot be trained. For example, parameters are
            complex, integer or all frozen, or the output is not one float32 tensor with the batch
            as its first axis.
    """
    for shared in _SHARED.get():
        known = shared.of(model, sample_shape, own_loss)
        if known is not None:
            return known
    return record_and_check(model, sample_shape, own_loss)


def record_and_check(
    model: nn.Module, sample_shape: tuple[int, ...], own_loss: bool = False
) -> Captured:
    """Record and check `model`. Raises ModelError like `capture`.

    If the gradients of model and recording differ, the model is recorded again with the gradients
    that its own functions define.
    """
    check_one_input(model)
    try:
        return recorded_once(model, sample_shape, own_loss)
    except ModelError as error:
        if error.code != "model.recording-differs":
            raise
        first = error
    with own_gradients() as calls:
        try:
            return recorded_once(model, sample_shape, own_loss)
        except ModelError as error:
            raise (custom_gradient(calls[0]) if calls else first) from error


@rare_collections()
def recorded_once(model: nn.Module, sample_shape: tuple[int, ...], own_loss: bool) -> Captured:
    """Record `model` once, and check the recording. Raises ModelError like `capture`."""
    check_parameters(model)
    try:
        (training, in_training), dtype = record_training(model, sample_shape, own_loss)
    except ModelError as error:
        # Do not run code that decides by values or draws: its loops might never end for zeros.
        decides = error.code.startswith(("model.data-dependent", "model.random-numbers"))
        explained = None if decides else wrong_input_shape(model, sample_shape)
        if explained is None:
            raise
        raise explained from error
    # The tables that the graph indexes show how many ids there are.
    with_limits(model, training)
    describe_input(training, input_range_of(model), parts_of_model(model))
    trained = [name for name, value in model.named_parameters() if value.requires_grad]
    try:
        inference, outputs = record_outputs(
            model, sample_shape, dtype, training=False, own_loss=own_loss
        )
    except ModelError:
        # The first batch may set what predictions need.
        take_out_writes(training, trained)
        raise
    if in_training.parts != outputs.parts:
        only = names_in_both(in_training, outputs) or [output_in_both(in_training, outputs)]
        training, _ = record_outputs(
            model, sample_shape, dtype, training=True, only=only, own_loss=own_loss
        )
        describe_input(training, input_range_of(model), parts_of_model(model))
        if len(outputs.parts) > len(only):
            inference, _ = record_outputs(
                model, sample_shape, dtype, training=False, only=only, own_loss=own_loss
            )
        outputs = outputs_in_both(in_training, outputs, only)
    input_range = checked_range(model, sample_shape, dtype)
    for graph in (training, inference):
        check_sizes(graph)
        check_operators(graph)
    check_deterministic(training, inference)
    for graph in (training, inference):
        take_out_writes(graph, trained)
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
    check_cuts(model, captured)
    check_recording(model, captured)
    fix_draws(inference)
    if not own_loss:  # the loss gets such rows as the model returns them
        check_rows(captured)
    return captured


def outputs_in_both(
    in_training: OutputForm, in_inference: OutputForm, only: Sequence[str]
) -> OutputForm:
    """The outputs of a model that exports only the outputs `only` of its training mode."""
    left_out = dict.fromkeys(
        [part.name for part in in_training.parts if part.name not in only],
        "it is returned only in training",
    )
    named = names_in_both(in_training, in_inference)
    if not named:
        return replace(in_inference, left_out=left_out, in_training=only[0])
    others = [part.name for part in in_inference.parts if part.name not in only]
    left_out |= dict.fromkeys(
        others, "it is returned only in inference, so the exported model leaves it out"
    )
    parts = tuple(part for part in in_inference.parts if part.name in only)
    one_mode, left_out = frozenset(left_out), {**in_inference.left_out, **left_out}
    return replace(in_inference, parts=parts, left_out=left_out, in_one_mode=one_mode)


def output_in_both(in_training: OutputForm, in_inference: OutputForm) -> str:
    """Choose the training output of a model that returns a single tensor in inference.

    Networks with auxiliary outputs return several outputs in training. The chosen output is
    `logits`, or else the first output.

    Raises:
        ModelError: The chosen output does not have the shape of the output in inference.
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
    model: nn.Module, sample_shape: tuple[int, ...], own_loss: bool
) -> tuple[tuple[GraphModule, OutputForm], Dtype]:
    """Record training with float32 samples, or with int64 samples if an embedding needs them."""
    try:
        recorded = record_outputs(model, sample_shape, "float32", training=True, own_loss=own_loss)
        return recorded, "float32"
    except ModelError as error:
        if not any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in model.modules()):
            raise
        first = error
    try:
        recorded = record_outputs(model, sample_shape, "int64", training=True, own_loss=own_loss)
        return recorded, "int64"
    except ModelError:
        # If float32 samples reach an embedding, PyTorch's message mentions "indices".
        if "indices" in str(first):
            raise
        raise first from None


def record(
    model: nn.Module, sample_shape: tuple[int, ...], dtype: Dtype, training: bool
) -> GraphModule:
    """Record `model` like `record_outputs`, but return only the graph."""
    return record_outputs(model, sample_shape, dtype, training)[0]


def record_outputs(
    model: nn.Module,
    sample_shape: tuple[int, ...],
    dtype: Dtype,
    training: bool,
    only: Collection[str] | None = None,
    own_loss: bool = False,
) -> tuple[GraphModule, OutputForm]:
    """Record a copy of `model` in training or inference mode as an ATen graph.

    The copy shares its parameters with `model`, because recording reads no values.

    Args:
        model: The model. It stays unchanged.
        sample_shape: Shape of one sample, without the batch.
        dtype: Type of the samples.
        training: Whether to record the model in training mode.
        only: Names of the outputs to record. None means all.
        own_loss: See `capture`.

    Returns:
        A graph for any batch of at least two samples, and the outputs that the graph returns
        packed.

    Raises:
        ModelError: The model cannot be copied or recorded.
    """
    try:
        twin = twin_of(model)
    except Exception as error:  # an attribute may be anything
        raise ModelError(
            "The model cannot be copied ({reason}). Its attributes must be modules, parameters, "
            "buffers and plain values; if it has others, give it a method __deepcopy__.",
            code="model.cannot-copy",
            reason=source_lines.first_line(error),
        ) from error
    forms = return_packed_output(twin, only, own_loss)
    graph = record_current_mode(twin.train(training), sample_shape, dtype)
    return graph, forms[-1]


def record_current_mode(
    model: nn.Module, sample_shape: tuple[int, ...], dtype: Dtype
) -> GraphModule:
    """ATen graph of `model` in its current mode. Raises ModelError if it cannot be recorded."""
    try:
        example = torch.zeros(MINIMUM_BATCH + 1, *sample_shape, dtype=DTYPES[dtype])
        changed = kept_tensors(model) | {name for name, _ in model.named_parameters()}
        graph = recorded_whole(model, changed, example)
    except EdgeTailorError:
        raise
    except Exception as error:  # the model's own code may raise any error
        raise_if_interrupted(error)
        reason = name_batch(source_lines.first_line(error))
        if "github" in reason:  # torch's advice is for its own developers
            reason = "its code needs values that a recording does not have"
        place, kind = source_lines.place_of_error(error), "int64 " if dtype == "int64" else ""
        raise ModelError(
            "The model cannot be recorded for {kind}samples of shape {shape}: "
            "{reason}{place}{remedy}",
            code="model.cannot-record",
            shape=sample_shape,
            dtype=dtype,
            kind=kind,
            reason=reason,
            place=place,
            remedy=shape_remedy(reason) or (MADE_LAYER if MAKES_LAYER.search(place) else ""),
        ) from error
    clean_up(graph)
    describe_input(graph, input_range_of(model), parts_of_model(model))
    return graph


def recorded_whole(model: nn.Module, changed: set[str], example: Tensor) -> GraphModule:
    """The graph of `model`. If the code divides batches into parts, the graph keeps them whole.

    Raises errors like `exported`.
    """
    try:
        return exported(model, changed, example)
    except ModelError as error:
        line = str(error.values.get("place", "")).removeprefix(" (").removesuffix(")")
        if error.code != "model.fixed-batch" or not DIVIDES.search(line):
            raise
        try:
            graph = exported(model, changed, example, mode=SmallBatch(line))
        except ModelError:
            raise error from None
    graph.meta[DIVIDED] = line
    return graph


def smallest_embedding(graph: GraphModule) -> int | None:
    """Number of rows of the smallest embedding that samples index directly. None if none does."""
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
