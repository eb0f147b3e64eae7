"""Functions of torch that recording replaces, because they decide by values."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import NoReturn
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.modules import transformer

LOCK = Lock()


class PackedSequenceError(Exception):
    """The model packs sequences of different lengths."""


def is_declared_causal(
    mask: Tensor | None, is_causal: bool | None = None, size: object = None
) -> bool:
    """Whether the caller says that `mask` is causal.

    PyTorch compares other masks with a causal one, to choose a faster kernel. A graph needs none.
    """
    return is_causal is True


def refuse_packing(*_: object) -> NoReturn:
    """Raise PackedSequenceError: the number of packed rows depends on the lengths."""
    raise PackedSequenceError


@contextmanager
def replaced_functions() -> Iterator[None]:
    """Context in which transformers take masks as they are given, and packing fails."""
    # The functions are globals of torch: two threads must not replace them at the same time.
    with (
        LOCK,
        patch.object(transformer, "_detect_is_causal_mask", is_declared_causal),
        patch.object(torch._VF, "_pack_padded_sequence", refuse_packing, create=True),
    ):
        yield
