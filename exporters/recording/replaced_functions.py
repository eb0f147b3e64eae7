"""Functions of torch that recording replaces, because they decide by values."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from unittest.mock import patch

from torch import Tensor
from torch.nn.modules import transformer

from exporters.recording.packed_sequences import padded_sequences

LOCK = Lock()


def is_declared_causal(
    mask: Tensor | None, is_causal: bool | None = None, size: object = None
) -> bool:
    """Whether the caller says that `mask` is causal.

    PyTorch compares other masks with a causal one, to choose a faster kernel. A graph needs none.
    """
    return is_causal is True


@contextmanager
def replaced_functions() -> Iterator[None]:
    """Context in which transformers take masks as they are given, and packing keeps padding."""
    # The functions are globals of torch: two threads must not replace them at the same time.
    with (
        LOCK,
        patch.object(transformer, "_detect_is_causal_mask", is_declared_causal),
        padded_sequences(),
    ):
        yield
