"""Speeds up the recording of LSTMs, which needs only the shapes of their results.

PyTorch runs every step on tensors without data to find the shapes. For 256 steps, this takes a
minute.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch._decomp import decompositions

from exporters.recurrence.replacements import LOCK

SELECTOR = "select_one_layer_lstm_function"


def empty_layer(
    x: Tensor, state: tuple[Tensor, Tensor], params: Any, has_biases: bool, reverse: bool = False
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return tensors with the shapes of the results of one LSTM layer, without computing results.

    For x (T, B, i) and states (B, h), (B, c), the results are an empty sequence (T, B, h) and
    copies of the states.
    """
    hidden, cell = state
    return hidden.new_empty((x.shape[0], *hidden.shape)), (hidden.clone(), cell.clone())


@contextmanager
def lstm_shapes_only() -> Iterator[None]:
    """Context in which an LSTM on tensors without data computes only shapes."""
    with LOCK:
        original = getattr(decompositions, SELECTOR)
        setattr(decompositions, SELECTOR, lambda *_: empty_layer)
        try:
            yield
        finally:
            setattr(decompositions, SELECTOR, original)
