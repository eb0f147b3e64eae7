"""Operators for recurrent layers over sequences of different lengths. They use masks.

PyTorch packs such sequences, so that the number of rows depends on the lengths. But graphs have
fixed shapes. So here the sequences stay padded. After its last step, a sample's states do not
change. The operators take the arguments of ATen's operators, followed by the number of steps of
each sample.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from exporters.recurrence.loop_operator import LIBRARY

LIBRARY.define(
    "packed_lstm(Tensor input, Tensor[] hx, Tensor[] params, bool has_biases, int num_layers, "
    "float dropout, bool train, bool bidirectional, bool batch_first, Tensor lengths) "
    "-> (Tensor, Tensor, Tensor)"
)
for kind in ("gru", "rnn_tanh", "rnn_relu"):
    LIBRARY.define(
        f"packed_{kind}(Tensor input, Tensor hx, Tensor[] params, bool has_biases, "
        "int num_layers, float dropout, bool train, bool bidirectional, bool batch_first, "
        "Tensor lengths) -> (Tensor, Tensor)"
    )


def mask_of_steps(steps: int, lengths: Tensor) -> Tensor:
    """Booleans (steps, B) that say which of the `steps` each sample has."""
    return torch.arange(steps, device=lengths.device).unsqueeze(1) < lengths


def unrolled(cell: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
    """Build the operator that runs `cell`, such as torch.gru_cell, step by step.

    Tracing replaces this operator by loops. Other code runs the operator step by step.
    """

    def run(
        x: Tensor,
        hx: Tensor | Sequence[Tensor],
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
        lengths: Tensor,
    ) -> tuple[Tensor, ...]:
        firsts = [hx] if isinstance(hx, Tensor) else list(hx)
        directions = 2 if bidirectional else 1
        if batch_first:
            x = x.transpose(0, 1)
        if torch.compiler.is_exporting():  # only shapes are needed
            sequence = x.new_empty((*x.shape[:2], directions * firsts[0].shape[2]))
            return sequence, *(first.clone() for first in firsts)
        mask = mask_of_steps(x.shape[0], lengths).unsqueeze(2)
        size, last = len(params) // (num_layers * directions), []
        for layer in range(num_layers):
            if layer:
                x = torch.dropout(x, dropout, train)
            sequences = []
            for number in range(layer * directions, (layer + 1) * directions):
                own = params[size * number : size * (number + 1)]
                states = [first[number] for first in firsts]
                order = range(x.shape[0])
                rows: list[Tensor] = [x] * x.shape[0]
                for t in reversed(order) if number % directions else order:
                    new = cell(x[t], states if len(states) > 1 else states[0], *own)
                    new = [new] if isinstance(new, Tensor) else list(new)
                    rows[t] = torch.where(mask[t], new[0], 0)
                    states = [torch.where(mask[t], n, s) for n, s in zip(new, states, strict=True)]
                sequences.append(torch.stack(rows))
                last.append(states)
            x = torch.cat(sequences, 2)
        if batch_first:
            x = x.transpose(0, 1)
        return x, *(torch.stack(column) for column in zip(*last, strict=True))

    return run


CELLS: dict[str, Callable[..., Any]] = {
    "packed_lstm": torch.lstm_cell,
    "packed_gru": torch.gru_cell,
    "packed_rnn_tanh": torch.rnn_tanh_cell,
    "packed_rnn_relu": torch.rnn_relu_cell,
}
for name, cell in CELLS.items():
    for key in ("Autograd", "CompositeExplicitAutograd"):
        LIBRARY.impl(name, unrolled(cell), key)

lstm = torch.ops.edgetailor.packed_lstm.default
gru = torch.ops.edgetailor.packed_gru.default
rnn_tanh = torch.ops.edgetailor.packed_rnn_tanh.default
rnn_relu = torch.ops.edgetailor.packed_rnn_relu.default
OPERATORS = {"LSTM": lstm, "GRU": gru, "RNN_TANH": rnn_tanh, "RNN_RELU": rnn_relu}
"""The operators by the `mode` of a module."""
