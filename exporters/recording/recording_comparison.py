"""Compares the outputs and gradients of a recording with those of the recorded model."""

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
from exporters.programs.dropout import SeededBernoulli, has_dropout
from exporters.programs.recorded_graph import MINIMUM_BATCH, casts_to_integers
from exporters.programs.sample_ranges import end_of_range, samples_in_range
from exporters.programs.tracing import DTYPES
from exporters.recording.batch_attributes import set_batch_size
from exporters.recording.captured import Captured
from exporters.recording.gradient_hooks import GradientHooks
from exporters.recording.inputs.input_ranges import input_range_of
from exporters.recording.model_checks import check_output_type
from exporters.recording.model_output import OutputForm, output_form
from exporters.recording.replacements.packed_sequences import sorted_packing
from exporters.recording.replacements.replaced_functions import as_on_devices, replaced_functions
from exporters.recording.replacements.uniform_draws import uniform_draws
from exporters.recording.shared_tensors import twin_of
from exporters.recurrence.packed_layers import OPERATORS
from profiles.errors import DataError, ModelError

RECORDING_TOLERANCE = 1e-3
"""Largest difference between a model and its recording, relative to the norm of the model's result.

Both run in float32, so only rounding errors may differ."""

WIDE = 1000.0
"""Samples with numbers of this size show whether a model takes them as ids."""
WRONG_ID = ("out of range", "out of bounds", "Class values must be")
"""Parts of PyTorch's messages about an id that a table does not have."""


def check_recording(model: nn.Module, captured: Captured) -> None:
    """Compare outputs and gradients of `model` with those of its recording, on random samples.

    Recording follows operators. Recording does not see code outside of operators, for example a
    custom backward pass.

    Raises:
        ModelError: The results differ, or the model itself fails or is not finite.
    """
    check_ids(model, captured)
    check_repeated_changes(captured)
    for training, graph in ((True, captured.training), (False, captured.inference)):
        generator = torch.Generator().manual_seed(0)
        x = random_samples(captured, generator)
        if packs_sequences(graph) and training:
            check_padded_length(model, x, captured.changed)
        # Run them one after the other, because each needs memory for activations.
        expected, references, state = original_results(model, training, captured, x, generator)
        sizes = total_norm([expected]), total_norm(references.values())
        check = partial(check_state, model, state)
        output, off = recorded_results(graph, training, captured, x, generator, references, check)
        errors = total_norm([output - expected]), off
        for what, error, size in zip(("output", "gradient"), errors, sizes, strict=True):
            # Negated, so that nan is an error too.
            if not error <= RECORDING_TOLERANCE * (size + 1e-6):
                raise ModelError(
                    "The recorded model has a different {what} than the model itself. Hooks that "
                    "change gradients, an embedding's max_norm and a custom backward pass cannot "
                    "be exported; remove them.",
                    code="model.recording-differs",
                    what=what,
                )


def original_results(
    model: nn.Module, training: bool, captured: Captured, x: Tensor, generator: torch.Generator
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """The output of `model` for `x`, gradients by parameter, and its tensors afterwards.

    The gradients are of one number: the sum of all output numbers, each times a random weight. They
    are computed only in training mode.
    """
    # A copy: running the model updates the statistics of its batch norms.
    original = twin_of(model, captured.buffers.keys() | captured.changed).train(training)
    graph = captured.training if training else captured.inference
    packing: AbstractContextManager[None] = nullcontext()
    if packs_sequences(graph):
        # Masks of dropouts have the shape of padded sequences.
        packing = replaced_functions() if has_dropout(graph) else sorted_packing()
    with packing, GradientHooks():
        output = run_original(original, x, captured.outputs)
    if not training:
        return output.detach(), {}, {}
    parameters = dict(original.named_parameters())
    check_attributes({name: parameters[name] for name in captured.changed})
    # A copy: checkpoints run batch norms again in the backward pass.
    after = parameters | {n: v.clone() for n, v in original.named_buffers()}
    leaves = [parameters[name] for name in captured.parameters]
    own = original_gradients(output, random_like(output, generator), leaves)
    return output.detach(), dict(zip(captured.parameters, own, strict=True)), after


def check_attributes(changed: Mapping[str, Tensor]) -> None:
    """Raise ModelError if `forward` has noted a tensor as an attribute of a parameter.

    Binarized networks note the weight before its change so. A recording would forget it.
    """
    for name, parameter in changed.items():
        for attribute, value in vars(parameter).items():
            if isinstance(value, Tensor):
                raise ModelError(
                    "The model changes its parameter {tensor!r} and keeps a tensor as the "
                    "attribute {attribute!r} of this parameter, which a device does not have. "
                    "Register it as a buffer, or compute with a changed copy of the parameter.",
                    code="model.writes-own-tensor",
                    tensor=name,
                    attribute=attribute,
                )


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
                outputs.append(output_form(returned, len(x)).pack(returned))
        except Exception:  # the user's code may raise anything
            outputs.append(None)
    first = outputs[0]
    if all(output is None for output in outputs):
        return  # it fails for another reason, which `run_original` reports
    if not isinstance(first, Tensor) or not all(
        isinstance(output, Tensor)
        and output.shape == first.shape
        and torch.allclose(output, first, RECORDING_TOLERANCE, RECORDING_TOLERANCE)
        for output in outputs
    ):
        raise ModelError(
            "The model's output for a sample depends on the longest sequence of the batch, because "
            "pad_packed_sequence pads to its length. Pass the number of steps to "
            "pad_packed_sequence: total_length=x.shape[1], or x.shape[0] for a layer without "
            "batch_first.",
            code="model.padded-length",
        )


def recorded_results(
    graph: GraphModule,
    training: bool,
    captured: Captured,
    x: Tensor,
    generator: torch.Generator,
    references: dict[str, Tensor],
    check_state: Callable[[Mapping[str, Tensor]], None],
) -> tuple[Tensor, float]:
    """The output of the recording, and the error of its gradients; see `original_results`.

    Each gradient is compared with that in `references` as soon as it is computed, and then
    released. All gradients together would take as much memory as the model. Removes all entries of
    `references`.
    """
    tensors = {n: v.detach() for n, v in captured.tensors.items()}
    tensors |= {n: v.clone() for n, v in tensors.items() if n in captured.buffers}
    tensors |= changed_parameters(writes_of(graph), tensors)
    leaves = {n: tensors[n].requires_grad_() for n in captured.parameters}
    # The same seed in both runs, so that dropouts use the same masks.
    with SeededBernoulli(0):
        output = functional_call(graph, tensors, (x,))
    output = output[0] if isinstance(output, tuple | list) else output
    if not training:
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
    squares += [total_norm([reference]) ** 2 for reference in references.values()]  # unused ones
    references.clear()
    return output.detach(), math.sqrt(sum(squares))


def check_state(
    model: nn.Module, own: Mapping[str, Tensor], recorded: Mapping[str, Tensor]
) -> None:
    """Raise ModelError if `model` has changed one of its `own` tensors, but its recording has not.

    A recording does not follow an assignment of a new tensor, such as `self.mean = new`.
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
            "self.mean.copy_(new).",
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


def random_outputs(captured: Captured, generator: torch.Generator) -> Tensor:
    """The outputs of the recorded model in inference for random samples, packed."""
    tensors = {name: value.detach() for name, value in captured.tensors.items()}
    tensors |= changed_parameters(writes_of(captured.inference), tensors)
    with torch.no_grad():
        output = functional_call(
            captured.inference, tensors, (random_samples(captured, generator),)
        )
    return output[0] if isinstance(output, tuple | list) else output  # type: ignore[no-any-return]


def random_like(output: Tensor, generator: torch.Generator) -> Tensor:
    """Random numbers in the shape of `output`, the same at every call."""
    return torch.randn(output.shape, generator=generator.manual_seed(1))


def total_norm(values: Iterable[Tensor]) -> float:
    """The Euclidean norm of all `values` together."""
    return math.sqrt(sum(float(value.detach().norm()) ** 2 for value in values))


def random_samples(captured: Captured, generator: torch.Generator) -> Tensor:
    """A batch of random samples of the shape and type that the recorded model takes."""
    shape = (MINIMUM_BATCH + 1, *captured.sample_shape)
    if captured.input_range:
        dtype = DTYPES[captured.sample_dtype]
        return samples_in_range(captured.input_range, shape, dtype, generator)
    if captured.sample_dtype == "int64":
        return torch.randint(captured.sample_limit or SAFE_LIMIT, shape, generator=generator)
    return torch.randn(shape, generator=generator)


def check_ids(model: nn.Module, captured: Captured) -> None:
    """Raise ModelError if the samples may hold ids that the model does not have.

    Some models use numbers of their samples as ids. Random samples may have valid ids by chance, so
    both ends of the range are tried. Without a range, samples of large numbers are tried.
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


def is_wrong_id(error: Exception) -> bool:
    """Whether PyTorch refuses an index or a class that a table does not have."""
    return isinstance(error, IndexError) or any(text in str(error) for text in WRONG_ID)


def unknown_ids(error: Exception) -> DataError:
    """The error for real samples with an id that the model does not have."""
    return DataError(
        "The samples hold ids that the model does not have: {reason}. Correct the data, or use a "
        "model with more ids.",
        code="data.unknown-ids",
        reason=source_lines.first_line(error),
    )


def wrong_ids(error: Exception, ranged: bool) -> ModelError:
    """The error for random samples with ids that the model does not have."""
    remedy = (
        "The range that you gave for the samples has ids that the model does not have. Correct it"
        if ranged
        else "Say which ids there are"
    )
    return ModelError(
        "The model takes numbers of its samples as ids, but random samples hold ids that the model "
        "does not have{place}. {remedy}: give --input-range LOW:HIGH, or --example FILE with real "
        "samples. In Python use set_input_range; in a federation's file set input_range or "
        "example.",
        code="model.ids-out-of-range",
        place=source_lines.place_of_error(error),
        remedy=remedy,
        reason=source_lines.first_line(error),
    )


def run_original(model: nn.Module, x: Tensor, outputs: OutputForm) -> Tensor:
    """The outputs of `model` for `x` as one tensor. Raises ModelError unless finite and float32."""
    try:
        with SeededBernoulli(0), uniform_draws(), as_on_devices():
            output = outputs.pack(sized(model, x)(x))
    except Exception as error:  # the user's code may raise anything
        if is_wrong_id(error):
            raise wrong_ids(error, bool(input_range_of(model))) from error
        raise ModelError(
            "The model fails on a batch of random samples: {reason}{place}",
            code="model.forward-fails",
            reason=source_lines.first_line(error),
            place=source_lines.place_of_error(error),
        ) from error
    check_output_type(output)
    assert isinstance(output, Tensor)
    check_finite(output, "output")
    return output


def sized(model: nn.Module, x: Tensor) -> nn.Module:
    """`model`, a copy, with the number of samples of `x` in attributes such as `batch_size`."""
    set_batch_size(model, len(x))
    return model


def original_gradients(output: Tensor, weight: Tensor, leaves: Iterable[Tensor]) -> list[Tensor]:
    """The gradients of the model itself.

    Raises ModelError if PyTorch fails, or if a gradient is not finite.
    """
    try:
        own = gradients(output, weight, leaves)
    except RuntimeError as error:
        raise ModelError(
            "PyTorch itself cannot train the model: {reason}. Run loss.backward() on a batch to "
            "see the failing line.",
            code="model.backward-fails",
            reason=source_lines.first_line(error),
        ) from error
    for gradient in own:
        check_finite(gradient, "gradient")
    return own


def check_finite(values: Tensor, what: str) -> None:
    """Raise ModelError if the model's own output or gradient holds nan or infinity."""
    if not torch.isfinite(values).all():
        raise ModelError(
            "The model's {what} on a batch of random samples contains nan or infinity, for example "
            "the logarithm of a negative number. It must be finite for all samples.",
            code="model.result-not-finite",
            what=what,
        )


def gradients(output: Tensor, weight: Tensor, leaves: Iterable[Tensor]) -> list[Tensor]:
    """Gradients of (output * weight).sum() with respect to `leaves`; zeros for unused leaves."""
    total = (output * weight).sum()
    return list(torch.autograd.grad(total, list(leaves), allow_unused=True, materialize_grads=True))
