"""Speeds up recording of LSTMs: recording needs only the shapes of their results.

PyTorch finds the shapes by running every step on tensors without data, which takes a minute for
256 steps.
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
    """Return the results of one LSTM layer in the right shapes, without computing them.

    For x (T, B, i) and states (B, h), (B, c): an empty sequence (T, B, h) and copies of the states.
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
