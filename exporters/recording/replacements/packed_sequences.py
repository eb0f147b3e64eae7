"""Lets models pack sequences of different lengths: their recordings keep the padding.

Models import PyTorch's functions under names of their own. Therefore the code of the functions is
replaced, not their names. While a model is recorded, a PackedSequence holds padded data (T, B,
...), and the number of steps of each sample in place of `batch_sizes`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.utils import rnn
from torch.nn.utils.rnn import PackedSequence

from exporters.recurrence.packed_layers import OPERATORS, mask_of_steps
from exporters.recurrence.recurrent_layers import lstm_projections
from exporters.recurrence.replacements import LOCK

LAYERS: tuple[type[nn.RNNBase], ...] = (nn.RNN, nn.LSTM, nn.GRU)
PACK, UNPACK = rnn.pack_padded_sequence, rnn.pad_packed_sequence


def copied(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copy `function`. The copy keeps this code when the code of `function` is replaced."""
    assert isinstance(function, FunctionType)
    return FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )


pack, unpack = copied(PACK), copied(UNPACK)


def keep_padded(
    sequences: Tensor, lengths: Tensor | Sequence[int], batch_first: bool
) -> PackedSequence:
    """The padded `sequences` with the time as their first axis, and their `lengths`."""
    counts = torch.as_tensor(lengths, dtype=torch.int64)
    return PackedSequence(sequences.transpose(0, 1) if batch_first else sequences, counts)


def padded_again(
    sequence: PackedSequence, batch_first: bool, value: float, total: int | None
) -> tuple[Tensor, Tensor]:
    """The padded data with `value` after each sample's last step, and the lengths."""
    data, lengths = sequence.data, sequence.batch_sizes
    mask = mask_of_steps(data.shape[0], lengths).view(*data.shape[:2], *[1] * (data.dim() - 2))
    data = torch.where(mask, data, value)
    if total is not None and total > data.shape[0]:
        pads = [0, 0] * (data.dim() - 1)
        data = nn.functional.pad(data, [*pads, 0, total - data.shape[0]], value=value)
    elif total is not None:
        data = data[:total]
    return data.transpose(0, 1) if batch_first else data, lengths


def run_packed(layer: Any, sequence: PackedSequence, hx: Any) -> tuple[PackedSequence, Any]:
    """Run a recurrent layer over padded data. A sample's states stay fixed after its last step."""
    layer._update_flat_weights()
    data, lengths, *_ = sequence
    if layer.proj_size:
        raise lstm_projections()
    is_lstm, directions = layer.mode == "LSTM", 2 if layer.bidirectional else 1
    if hx is None:
        shape = layer.num_layers * directions, data.shape[1], layer.hidden_size
        zeros = [torch.zeros(shape, dtype=data.dtype, device=data.device) for _ in range(2)]
        hx = (zeros[0], zeros[1]) if is_lstm else zeros[0]
    output, *last = OPERATORS[layer.mode](
        data,
        list(hx) if is_lstm else hx,
        layer._flat_weights,
        layer.bias,
        layer.num_layers,
        float(layer.dropout),
        layer.training,
        layer.bidirectional,
        False,
        lengths,
    )
    return PackedSequence(output, lengths), tuple(last) if is_lstm else last[0]


# The code of the following functions runs with the global names of PyTorch's module, so they import
# our modules themselves.
def padding_pack(
    input: Tensor, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True
) -> Any:
    """Keep the padding of the sequences."""
    from exporters.recording.replacements.packed_sequences import keep_padded

    return keep_padded(input, lengths, batch_first)


def padding_unpack(
    sequence: Any,
    batch_first: bool = False,
    padding_value: float = 0.0,
    total_length: int | None = None,
) -> Any:
    """Fill the padding with `padding_value`."""
    from exporters.recording.replacements.packed_sequences import padded_again

    return padded_again(sequence, batch_first, padding_value, total_length)


def sorting_pack(
    input: Tensor, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True
) -> Any:
    """Pack samples in any order, because devices shuffle them."""
    from exporters.recording.replacements.packed_sequences import pack

    return pack(input, lengths, batch_first, enforce_sorted=False)


def longer_unpack(
    sequence: Any,
    batch_first: bool = False,
    padding_value: float = 0.0,
    total_length: int | None = None,
) -> Any:
    """Pad to the longest sequence plus two steps, unless the model gives a number of steps."""
    from exporters.recording.replacements.packed_sequences import unpack

    steps = sequence.batch_sizes.size(0) + 2 if total_length is None else total_length
    return unpack(sequence, batch_first, padding_value, steps)


@contextmanager
def code_of(function: Any, other: Any) -> Iterator[None]:
    """Context in which `function`, under all of its names, runs the code of `other`."""
    with LOCK:
        own, function.__code__ = function.__code__, other.__code__
        try:
            yield
        finally:
            function.__code__ = own


def forward_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """The method `forward` of a layer, which also takes packed sequences that stay padded."""

    def forward(layer: Any, input: Any, hx: Any = None) -> Any:
        if isinstance(input, PackedSequence):
            return run_packed(layer, input, hx)
        return original(layer, input, hx)

    return forward


@contextmanager
def padded_sequences() -> Iterator[None]:
    """Context in which packed sequences stay padded."""
    with ExitStack() as stack:
        stack.enter_context(code_of(PACK, padding_pack))
        stack.enter_context(code_of(UNPACK, padding_unpack))
        for kind in LAYERS:
            stack.enter_context(patch.object(kind, "forward", forward_of(kind.forward)))
        yield


@contextmanager
def sorted_packing(longer: bool = False) -> Iterator[None]:
    """Context in which models pack samples in any order.

    With `longer`, models pad packed sequences to more steps than the longest sequence has.
    """
    with (
        code_of(PACK, sorting_pack),
        code_of(UNPACK, longer_unpack if longer else unpack),
    ):
        yield
