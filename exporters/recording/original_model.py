"""Runs the user's own model beside its recording: its outputs and gradients must be finite."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from exporters.programs import source_lines
from exporters.programs.seeded_random import SeededBernoulli
from exporters.recording.batch_attributes import set_batch_size
from exporters.recording.inputs.input_ranges import input_range_of
from exporters.recording.inputs.unknown_ids import is_wrong_id, wrong_ids
from exporters.recording.model_checks import check_output_type
from exporters.recording.model_output import OutputForm
from exporters.recording.replacements.python_code.python_draws import python_draws
from exporters.recording.replacements.random_functions import uniform_draws
from exporters.recording.replacements.replaced_functions import as_on_devices
from profiles.errors import ModelError

NUMBERS_OF_SAMPLES = (
    ". Without a range, random samples are standard normal numbers. If the model checks its "
    "samples, give their range: --input-range LOW:HIGH, or --example FILE with real samples."
)


def run_original(
    model: nn.Module, x: Tensor, outputs: OutputForm, draws: SeededBernoulli
) -> Tensor:
    """The outputs of `model` for `x` as one tensor. ModelError unless it is finite and float32."""
    try:
        with draws.again(), uniform_draws(), as_on_devices(), python_draws(model):
            output = outputs.pack(sized(model, x)(x), len(x))
    except Exception as error:  # the user's code may raise anything
        if is_wrong_id(error):
            raise wrong_ids(error, bool(input_range_of(model))) from error
        raise ModelError(
            "The model fails on a batch of random samples: {reason}{place}{remedy}",
            code="model.forward-fails",
            remedy=NUMBERS_OF_SAMPLES if source_lines.is_raised_by_user(error) else "",
            reason=source_lines.first_line(error),
            place=source_lines.place_of_error(error),
        ) from error
    check_output_type(output)
    assert isinstance(output, Tensor)
    check_finite(output, "output")
    return output


def sized(model: nn.Module, x: Tensor) -> nn.Module:
    """Set attributes of `model`, such as `batch_size`, to the number of samples of `x`.

    Pass a copy of the model.
    """
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
    """Raise ModelError if the model's own output or gradient contains nan or infinity."""
    if torch.isneginf(values).any() and not (torch.isnan(values) | torch.isposinf(values)).any():
        raise ModelError(
            "The model's {what} on a batch of random samples contains minus infinity. It must be "
            "finite. If places are masked, give them a large negative number, as in "
            "masked_fill(mask, -1e9).",
            code="model.result-not-finite",
            what=what,
        )
    if not torch.isfinite(values).all():
        raise ModelError(
            "The model's {what} on a batch of random samples contains nan or infinity, for example "
            "the logarithm of a negative number. It must be finite for all samples. The random "
            "samples are normally distributed. If the numbers of your samples have another range, "
            "give this range, for example with --input-range 0:1. If the model takes several "
            "inputs, give real samples with --example.",
            code="model.result-not-finite",
            what=what,
        )


def gradients(output: Tensor, weight: Tensor, leaves: Iterable[Tensor]) -> list[Tensor]:
    """Gradients of (output * weight).sum() with respect to `leaves`; zeros for unused leaves."""
    total = (output * weight).sum()
    return list(torch.autograd.grad(total, list(leaves), allow_unused=True, materialize_grads=True))
