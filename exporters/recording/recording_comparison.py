"""Compares a recording with the recorded model: outputs and gradients."""

import math
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx import GraphModule

from device_agent.formats.manifest import SAFE_LIMIT
from exporters.programs import source_lines
from exporters.programs.changed_parameters import changed_parameters, writes_of
from exporters.programs.recorded_graph import MINIMUM_BATCH, casts_to_integers
from exporters.programs.sample_ranges import end_of_range, samples_in_range
from exporters.programs.seeded_random import SeededBernoulli, has_dropout
from exporters.programs.tracing import DTYPES
from exporters.recording.captured import Captured
from exporters.recording.choices.merged_paths import CHOICES
from exporters.recording.gradient_hooks import GradientHooks, LimitedReads, ReadsTooMuch
from exporters.recording.inputs.unknown_ids import is_wrong_id, wrong_ids
from exporters.recording.model_output import output_form
from exporters.recording.original_model import original_gradients, run_original, sized
from exporters.recording.parameter_writes import check_attributes
from exporters.recording.replacements.custom_gradients import has_own_functions
from exporters.recording.replacements.packed_sequences import sorted_packing
from exporters.recording.replacements.replaced_functions import replaced_functions
from exporters.recording.shared_tensors import twin_of
from exporters.recording.sizes.cut_sequences import CUTS
from exporters.recurrence.packed_layers import OPERATORS
from profiles.errors import ModelError

SEEDS = 7, 183
"""Seeds with which the first drawn number is below 0.01 or above 0.99."""
RECORDING_TOLERANCE = 1e-3
"""Largest difference between a model and its recording, relative to the norm of the model's result.

Both run in float32, so only rounding errors may differ."""

SPREAD = 10.0
"""If a model has functions with own gradients, it is also compared on samples multiplied by this
number: such a gradient may agree with the forward pass only for small numbers."""
WIDE = 1000.0
"""Samples with numbers of this size show whether a model takes them as ids."""


def check_recording(model: nn.Module, captured: Captured) -> None:
    """Compare `model` with its recording on random samples: outputs and gradients.

    A recording contains only operators. It does not contain other code, for example a custom
    backward pass.

    Raises:
        ModelError: The results differ, or the model itself fails or is not finite.
    """
    check_ids(model, captured)
    check_repeated_changes(captured)
    for graph in (captured.training, captured.inference):
        for draws in draws_of(graph):
            try:
                check_graph(model, captured, graph, draws)
            except ModelError as error:
                numbered = error.code == "model.recording-differs" and draws.step
                if not numbered or not has_dropout(graph):
                    raise
                # A draw that no output needs is not in the graph. Later draws have other numbers.
                for seed in SEEDS:
                    check_graph(model, captured, graph, SeededBernoulli(seed, numbered=False))


def draws_of(graph: GraphModule) -> list[SeededBernoulli]:
    """The contexts that fix the random draws when `graph` is compared with its model.

    If `graph` chooses between paths, the model draws only on the path that it takes. So all draws
    of one shape are made equal: small in one comparison, and large in another.
    """
    if graph.meta.get(CUTS):
        return []  # `cut_check.py` compares it
    if CHOICES not in graph.meta:
        return [SeededBernoulli(0)]
    seeds = SEEDS if has_dropout(graph) else SEEDS[:1]
    return [SeededBernoulli(seed, numbered=False) for seed in seeds]


def check_graph(
    model: nn.Module,
    captured: Captured,
    graph: GraphModule,
    draws: SeededBernoulli,
    x: Tensor | None = None,
) -> None:
    """Compare one graph of a recording with its model, for the samples `x` or random samples.

    Raises ModelError like `check_recording`.
    """
    training, generator = graph is captured.training, torch.Generator().manual_seed(0)
    given, x = x is not None, random_samples(captured, generator) if x is None else x
    if packs_sequences(graph) and training:
        check_padded_length(model, x, captured.changed)
    # Run them one after the other, because each needs memory for activations.
    expected, references, state, functions = original_results(
        model, graph, captured, x, generator, draws
    )
    sizes = total_norm([expected]), total_norm(references.values())
    check = partial(check_state, model, state)
    output, off = recorded_results(graph, captured, x, generator, draws, references, check)
    same = output.shape == expected.shape
    errors = total_norm([output - expected]) if same else math.inf, off
    for what, error, size in zip(("output", "gradient"), errors, sizes, strict=True):
        # Negated, so that nan is an error too.
        if not error <= RECORDING_TOLERANCE * (size + 1e-6):
            raise recording_differs(what)
    if functions and not given and x.is_floating_point() and not captured.input_range:
        try:
            check_graph(model, captured, graph, draws, SPREAD * x)
        except ModelError as error:
            # Other errors say that the model is not made for such samples.
            if error.code == "model.recording-differs":
                raise


def recording_differs(what: str) -> ModelError:
    """The error for a recording whose output or gradient differs from the model."""
    return ModelError(
        "The recorded model has a different {what} than the model itself. Hooks that change "
        "gradients, an embedding's max_norm and a custom backward pass cannot be exported; remove "
        "them.",
        code="model.recording-differs",
        what=what,
    )


def original_results(
    model: nn.Module,
    graph: GraphModule,
    captured: Captured,
    x: Tensor,
    generator: torch.Generator,
    draws: SeededBernoulli,
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor], bool]:
    """The output of `model` for `x`, its gradients by parameter, and its tensors after the run.

    The last value tells whether the model has functions with their own gradients.

    The gradients are those of one number: the sum of all numbers of the output, each multiplied by
    a random weight. Gradients are computed only in training mode.
    """
    # A copy: running the model updates the statistics of its batch norms.
    training = graph is captured.training
    original = twin_of(model, captured.buffers.keys() | captured.changed).train(training)
    packing: AbstractContextManager[None] = nullcontext()
    if packs_sequences(graph):
        # Masks of dropouts have the shape of padded sequences.
        packing = replaced_functions() if has_dropout(graph) else sorted_packing()
    with packing, GradientHooks():
        output = run_original(original, x, captured.outputs, draws)
    if not training:
        return output.detach(), {}, {}, False
    parameters = dict(original.named_parameters())
    check_attributes({name: parameters[name] for name in captured.changed})
    # A copy: a backward pass may run batch norms again, as checkpoints of libraries do.
    after = parameters | {n: v.clone() for n, v in original.named_buffers()}
    leaves = [parameters[name] for name in captured.parameters]
    functions = has_own_functions(output)
    try:
        with LimitedReads():
            own = original_gradients(output, random_like(output, generator), leaves)
    except ReadsTooMuch as error:
        raise recording_differs("gradient") from error
    return output.detach(), dict(zip(captured.parameters, own, strict=True)), after, functions


def packs_sequences(graph: GraphModule) -> bool:
    """Whether the recorded `graph` has a recurrent layer over packed sequences."""
    packed = OPERATORS.values()
    return any(node.target in packed for node in graph.graph.nodes)


def check_padded_length(model: nn.Module, x: Tensor, changed: Container[str]) -> None:
    """Raise ModelError if the output of `model` depends on the longest sequence of the batch."""
    outputs = list[object]()
    for context in (sorted_packing(), sorted_packing(longer=True), replaced_functions()):
        try:
            with context:
                returned = sized(twin_of(model, changed).eval(), x)(x)
                outputs.append(output_form(returned, len(x)).pack(returned, len(x)))
        except Exception:  # the user's code may raise anything
            outputs.append(None)
    first = outputs[0]
    if all(output is None for output in outputs):
        return  # the model fails for another reason, which `run_original` reports
    if not isinstance(first, Tensor) or not all(
        isinstance(output, Tensor)
        and output.shape == first.shape
        and torch.allclose(output, first, RECORDING_TOLERANCE, RECORDING_TOLERANCE)
        for output in outputs
    ):
        raise ModelError(
            "The model's output for a sample depends on the longest sequence of the batch, because "
            "pad_packed_sequence pads to the length of that sequence. Pass the number of steps to "
            "pad_packed_sequence: total_length=x.shape[1], or x.shape[0] for a layer without "
            "batch_first.",
            code="model.padded-length",
        )


def recorded_results(
    graph: GraphModule,
    captured: Captured,
    x: Tensor,
    generator: torch.Generator,
    draws: SeededBernoulli,
    references: dict[str, Tensor],
    check_state: Callable[[Mapping[str, Tensor]], None],
) -> tuple[Tensor, float]:
    """The output of the recording, and the error of its gradients; see `original_results`.

    Each gradient is compared with its entry in `references` as soon as it is computed, and then
    released. Otherwise all gradients together would take as much memory as the model. Removes all
    entries of `references`.
    """
    tensors = {n: v.detach() for n, v in captured.tensors.items()}
    tensors |= {n: v.clone() for n, v in tensors.items() if n in captured.buffers}
    tensors |= changed_parameters(writes_of(graph), tensors)
    leaves = {n: tensors[n].requires_grad_() for n in captured.parameters}
    # The same seed in both runs, so that dropouts use the same masks.
    with draws.again():
        output = functional_call(graph, tensors, (x,))
    output = output[0] if isinstance(output, tuple | list) else output
    if graph is not captured.training:
        return output.detach(), 0.0
    check_state(tensors)
    squares = []
    for name, leaf in leaves.items():

        def compare(computed: Tensor, name: str = name) -> None:
            assert computed.grad is not None
            squares.append(total_norm([computed.grad - references.pop(name)]) ** 2)
            computed.grad = None

        leaf.register_post_accumulate_grad_hook(compare)  # type: ignore[no-untyped-call]
    total = (output * random_like(output, generator)).sum()
    torch.autograd.backward(total, inputs=list(leaves.values()))
    squares += [total_norm([reference]) ** 2 for reference in references.values()]  # unused
    references.clear()
    return output.detach(), math.sqrt(sum(squares))


def check_state(
    model: nn.Module, own: Mapping[str, Tensor], recorded: Mapping[str, Tensor]
) -> None:
    """Raise ModelError if `model` has changed one of its `own` tensors but its recording has not.

    A recording does not contain the assignment of a new tensor, such as `self.mean = new`.
    """
    for name, after in recorded.items():
        value = own.get(name)
        if value is after or value is None:
            continue
        value, after = value.detach(), after.detach()
        if value.shape == after.shape and torch.allclose(
            value, after, RECORDING_TOLERANCE, RECORDING_TOLERANCE * 1e-3
        ):
            continue
        raise ModelError(
            "The model changes its own tensor {tensor!r} when it trains{place}, but the recording "
            "does not. Write a new value of the same shape and type into the tensor, as in "
            "self.mean.copy_(new). If the tensor is a parameter, first freeze it with "
            "self.mean.requires_grad_(False), and write under torch.no_grad().",
            code="model.writes-own-tensor",
            tensor=name,
            place=source_lines.place_of_assignment(model, name),
        )


def check_repeated_changes(captured: Captured) -> None:
    """Raise ModelError if a second prediction would change the model's parameters again."""
    writes, generator = writes_of(captured.inference), torch.Generator().manual_seed(0)
    tensors = {name: value.detach() for name, value in captured.tensors.items()}
    tensors |= {n: torch.randn(tensors[n].shape, generator=generator) for n in captured.changed}
    once = changed_parameters(writes, tensors)
    for name, again in changed_parameters(writes, tensors | once).items():
        if not total_norm([again - once[name]]) <= RECORDING_TOLERANCE * total_norm([again]):
            raise ModelError(
                "Each prediction changes the model's parameter {tensor!r} further. A prediction "
                "must leave the model as it is: change the parameter only `if self.training:`.",
                code="model.writes-own-tensor",
                tensor=name,
            )


def check_rows(captured: Captured) -> None:
    """Raise ModelError if an output that joins batch and steps does not keep samples together."""
    rows, shapes = captured.outputs.rows, {p.name: p.shape for p in captured.outputs.parts}
    joined = [shapes[name] for name, place in rows.items() if place.count is not None]
    if not joined:
        return
    generator = torch.Generator().manual_seed(0)
    x, other = random_samples(captured, generator), random_samples(captured, generator)
    other[:-1] = x[:-1]
    first, second = (predicted(captured, samples)[:-1] for samples in (x, other))
    if not torch.allclose(first, second, RECORDING_TOLERANCE, RECORDING_TOLERANCE):
        raise ModelError(
            "The model's output is {shape}, and the rows of a sample are not together. Return the "
            "batch as the first axis, separate from the others, as in "
            "y.view({count}, -1, y.shape[-1]).transpose(0, 1).",
            code="model.wrong-output",
            shape=f"({', '.join([f'batch * {joined[0][0]}', *map(str, joined[0][1:])])})",
            count=joined[0][0],
        )


def random_outputs(captured: Captured, generator: torch.Generator) -> Tensor:
    """The outputs of the recorded model in inference for random samples, packed."""
    return predicted(captured, random_samples(captured, generator))


def predicted(captured: Captured, x: Tensor) -> Tensor:
    """The outputs of the recorded model in inference for `x`, packed."""
    tensors = {name: value.detach() for name, value in captured.tensors.items()}
    tensors |= changed_parameters(writes_of(captured.inference), tensors)
    # Some tensors are read in training only.
    read = {node.target for node in captured.inference.graph.find_nodes(op="get_attr")}
    tensors = {name: value for name, value in tensors.items() if name in read}
    with torch.no_grad():
        output = functional_call(captured.inference, tensors, (x,))
    return output[0] if isinstance(output, tuple | list) else output  # type: ignore[no-any-return]


def random_like(output: Tensor, generator: torch.Generator) -> Tensor:
    """Random numbers in the shape of `output`. Every call returns the same numbers."""
    return torch.randn(output.shape, generator=generator.manual_seed(1))


def total_norm(values: Iterable[Tensor]) -> float:
    """The Euclidean norm of all numbers in `values`."""
    return math.sqrt(sum(float(value.detach().norm()) ** 2 for value in values))


def random_samples(
    captured: Captured, generator: torch.Generator, rows: int = MINIMUM_BATCH + 1
) -> Tensor:
    """A batch of random samples of the shape and type that the recorded model takes."""
    shape = (rows, *captured.sample_shape)
    if captured.input_range:
        dtype = DTYPES[captured.sample_dtype]
        return samples_in_range(captured.input_range, shape, dtype, generator)
    if captured.sample_dtype == "int64":
        return torch.randint(captured.sample_limit or SAFE_LIMIT, shape, generator=generator)
    return torch.randn(shape, generator=generator)


def check_ids(model: nn.Module, captured: Captured) -> None:
    """Raise ModelError if the samples may contain ids that the model does not have.

    Some models use numbers of their samples as ids. Random samples may have valid ids by chance, so
    samples at both ends of the range are tried. Without a range, samples of large numbers are
    tried.
    """
    tried = list[Tensor]()
    if captured.input_range:
        shape, dtype = (MINIMUM_BATCH + 1, *captured.sample_shape), DTYPES[captured.sample_dtype]
        tried += [end_of_range(captured.input_range, shape, dtype, high=h) for h in (False, True)]
    elif captured.sample_dtype == "float32" and any(
        casts_to_integers(node) for node in captured.inference.graph.nodes
    ):
        tried.append(WIDE * random_samples(captured, torch.Generator().manual_seed(0)))
    for x in tried:
        try:
            with torch.no_grad(), SeededBernoulli(0):
                sized(twin_of(model, captured.changed).eval(), x)(x)
        except Exception as error:  # the user's code may raise anything
            if is_wrong_id(error):
                raise wrong_ids(error, bool(captured.input_range)) from error
