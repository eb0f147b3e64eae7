"""Functions of torch that recording replaces, because they branch on the values of tensors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.modules import adaptive, transformer
from torch.utils import checkpoint

from exporters.recording.replacements.packed_sequences import padded_sequences
from exporters.recurrence.replacements import LOCK


def is_declared_causal(
    mask: Tensor | None, is_causal: bool | None = None, size: object = None
) -> bool:
    """Whether the caller says that `mask` is causal.

    PyTorch compares other masks with a causal mask, to choose a faster kernel. A graph needs no
    such comparison.
    """
    return is_causal is True


def enter_disabled(context: Any) -> Any:
    """Enter the autocast `context` without a change of types."""
    own, context._enabled = context._enabled, False
    try:
        return ENTER_AUTOCAST(context)
    finally:
        context._enabled = own


ENTER_AUTOCAST: Callable[[Any], Any] = torch.autocast.__enter__


class NoCheckpoint:
    """Runs a part of a model without a checkpoint: the export chooses what to compute again."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """Call `function`."""
        return function(*args)


def no_hooks(*_: Any, **__: Any) -> Iterator[None]:
    """Keep all values of a part that a checkpoint without `use_reentrant` would compute again.

    A second computation would draw other masks of dropouts than the first.
    """
    yield


def all_classes(layer: nn.AdaptiveLogSoftmaxWithLoss, input: Tensor, target: Tensor) -> Any:
    """Compute the log-probabilities of all classes, and choose those of the targets.

    PyTorch computes clusters only if some target is in them.
    """
    chosen = layer.log_prob(input).gather(1, target.reshape(-1, 1))
    output = chosen.reshape(target.shape)
    return adaptive._ASMoutput(output, (-output).mean())


@contextmanager
def as_on_devices() -> Iterator[None]:
    """Context without autocast, because devices compute in float32, and without checkpoints."""
    with (
        LOCK,
        patch.object(torch.autocast, "__enter__", enter_disabled),
        patch.object(checkpoint, "CheckpointFunction", NoCheckpoint),
        patch.object(checkpoint, "_checkpoint_without_reentrant_generator", no_hooks),
    ):
        yield


@contextmanager
def replaced_functions() -> Iterator[None]:
    """Context in which transformers do not compare masks, and packing keeps padding.

    Adaptive softmax computes all classes. Autocast and checkpoints change nothing.
    """
    with (
        LOCK,
        patch.object(transformer, "_detect_is_causal_mask", is_declared_causal),
        patch.object(nn.AdaptiveLogSoftmaxWithLoss, "forward", all_classes),
        padded_sequences(),
        as_on_devices(),
    ):
        yield
