"""Chooses the tensor to train if a model returns several, as `transformers` and detectors do."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

PREFERRED = "logits"
"""The key of the output that is trained, if a model returns a mapping with it."""


def trained_output(returned: object) -> object:
    """Choose the output to train from the value that a model returns.

    Args:
        returned: The value that the model returns.

    Returns:
        For a mapping (such as the `ModelOutput` of transformers), its `logits` or else its first
        value. For a tuple or list, its first value. Otherwise `returned` itself.

    Examples:
        >>> trained_output({"hidden": 1, "logits": 2}), trained_output((3, 4)), trained_output(5)
        (2, 3, 5)
    """
    if isinstance(returned, Mapping) and returned:
        preferred = returned.get(PREFERRED)
        return trained_output(next(iter(returned.values())) if preferred is None else preferred)
    if isinstance(returned, tuple | list) and returned:
        return trained_output(returned[0])
    return returned


def return_trained_output(model: nn.Module) -> None:
    """Make `model` take one tensor and return only its trained output.

    This changes `model`, so pass a copy of the user's model.
    """
    forward = model.forward

    # A module around the model would rename all tensors.
    def one_output(x: Tensor) -> Any:
        return trained_output(forward(x))

    model.forward = one_output
