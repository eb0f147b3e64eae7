"""Lets the user set the range of a model's samples. Random samples are drawn from this range."""

import math
from typing import TypeVar

import numpy as np
from torch import nn

from device_agent.formats.input_range import InputRange, fits
from device_agent.formats.manifest import Dtype
from exporters.recording.inputs.packed_inputs import (
    parts_of_model,
    range_of_parts,
    with_packed_inputs,
)
from exporters.recording.inputs.sample_range import Inputs, range_between, range_of_examples
from profiles.errors import InputError

Model = TypeVar("Model", bound=nn.Module)
ATTRIBUTE = "_edgetailor_input_range"


def set_input_range(
    model: Model,
    low: float | None = None,
    high: float | None = None,
    *,
    examples: np.ndarray | None = None,
) -> Model:
    """Set the range of the numbers in the samples of `model`. Random samples are drawn from it.

    Use this before `split` in two cases. In the first case, the model uses numbers of its samples
    as ids, for example for an embedding. In the second case, it fails on some numbers, for example
    on negative numbers. Recording, verification and the profiles of devices run on random samples.
    Without a range, random samples are standard normal.

    Args:
        model: The model. Copies of the model also have the range.
        low: The smallest number.
        high: The largest number. If `low` and `high` are integers, all numbers are whole.
        examples: At least two real samples (n, *sample shape), instead of `low` and `high`. Each
            number of a sample gets the range that it has in the examples. If a number is whole in
            all examples, it is whole in random samples.

    Returns:
        `model` itself.

    Raises:
        InputError: The range is empty, or the examples are not at least two such samples.

    Examples:
        >>> _ = set_input_range(nn.Embedding(5, 2), 0, 4)
    """
    if examples is not None:
        return with_input_range(model, range_of_examples(examples, "examples"))
    if low is None or high is None:
        raise InputError(
            "set_input_range needs `low` and `high`, or `examples`.",
            code="option.missing",
            option="low",
        )
    return with_input_range(model, range_between(low, high))


def with_input_range(model: Model, input_range: InputRange) -> Model:
    """Set the range of the samples of `model`, unless it is empty. Returns `model` itself."""
    if input_range:
        setattr(model, ATTRIBUTE, input_range)
    return model


def input_range_of(model: nn.Module) -> InputRange:
    """The range that was set for the samples of `model`. Empty if none was set."""
    known: InputRange = getattr(model, ATTRIBUTE, ())
    parts = parts_of_model(model)
    if len(known) == 1:  # one range, which is not that of ids
        return range_of_parts(parts, known[0]) or known
    return known or range_of_parts(parts)


def with_inputs(model: Model, inputs: Inputs) -> Model:
    """Set the known facts about the inputs of `model`. Returns `model` itself.

    Raises ModelError if `forward` does not take the inputs.
    """
    return with_input_range(with_packed_inputs(model, inputs.parts), inputs.range)


def checked_range(model: nn.Module, sample_shape: tuple[int, ...], dtype: Dtype) -> InputRange:
    """The range of the samples of `model`. Raises InputError if it does not fit shape or type."""
    known = input_range_of(model)
    if known and not fits(known, math.prod(sample_shape)):
        raise InputError(
            "The examples that give the range of the samples have another shape than the model's "
            "samples. Give examples of the shape {shape}.",
            code="config.range-misfit",
            shape=sample_shape,
        )
    if dtype == "int64" and not all(i.whole and (i.low or 0) >= 0 for i in known):
        raise InputError(
            "The model takes int64 samples, which are whole numbers of at least 0. The range that "
            "was set has other numbers. Give a range such as 0:9.",
            code="config.range-misfit",
            shape=sample_shape,
        )
    return known
