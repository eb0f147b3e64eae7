"""Recurrent layers of a recorded graph, all layers and directions, by loops over time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from exporters.recurrence.loop_operator import loop
from exporters.recurrence.recurrent_steps import GRU, LSTM, RELU, TANH
from profiles.errors import ExportError

aten = torch.ops.aten
STEPS = {
    aten.lstm.input: LSTM,
    aten.gru.input: GRU,
    aten.rnn_tanh.input: TANH,
    aten.rnn_relu.input: RELU,
}
RECURRENT = tuple(STEPS)


class OpenRecurrence(TorchFunctionMode):
    """Runs recurrent layers as loops; PyTorch's own way unrolls them when it is traced."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Replace recurrent layers; leave the rest."""
        if func in STEPS:
            return recurrent(STEPS[func], *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Cell:
    """One layer and direction: w_x (gates * n, i), w_h (gates * n, n), and both biases or none."""

    step: str
    w_x: Tensor
    w_h: Tensor
    biases: Sequence[Tensor]
    reverse: bool

    def run(self, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """x (T, i, B) and first states (n, B) -> hidden states (T, n, B), and the last states."""
        biases = [bias.unsqueeze(1) for bias in self.biases]
        if self.step != GRU and biases:  # a GRU's second bias stands within a product with r
            biases = [biases[0] + biases[1]]
        constants = [self.w_x, self.w_h, *biases]
        results = loop(self.step, list(states), [x], constants, self.reverse)
        return results[len(states)], results[: len(states)]


def recurrent(
    step: str,
    x: Tensor,
    hx: Tensor | Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """The layers of `aten::lstm` and its like, with their arguments and results.

    x is (T, B, i), or (B, T, i) where `batch_first`; each first state (layers * directions, B, n).
    Raises ExportError for an LSTM with projections and for dropout between layers.
    """
    if train and dropout and num_layers > 1:
        raise ExportError(
            "The model has dropout between recurrent layers, which cannot be exported; set it to 0."
        )
    states = [hx] if isinstance(hx, Tensor) else list(hx)
    each = 4 if has_biases else 2
    directions = 2 if bidirectional else 1
    if len(params) != each * num_layers * directions:
        raise ExportError(
            "The model has an LSTM with projections (proj_size), which cannot be exported; leave "
            "proj_size out and put a linear layer behind the LSTM."
        )
    x = x.permute(1, 2, 0) if batch_first else x.transpose(1, 2)
    last = []
    for layer in range(num_layers):
        sequences = []
        for place in range(layer * directions, (layer + 1) * directions):
            w_x, w_h, *biases = params[each * place : each * (place + 1)]
            cell = Cell(step, w_x, w_h, biases, reverse=place % directions == 1)
            sequence, final = cell.run(x, [state[place].t() for state in states])
            sequences.append(sequence)
            last.append(final)
        x = sequences[0] if directions == 1 else torch.cat(sequences, 1)
    x = x.permute(2, 0, 1) if batch_first else x.transpose(1, 2)
    return x, *(torch.stack(column).transpose(1, 2) for column in zip(*last, strict=True))
