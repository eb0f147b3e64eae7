"""Runs the recurrent layers of a recorded graph as loops over time, in all directions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exporters.recurrence import packed_layers as packed
from exporters.recurrence.loop_operator import loop
from exporters.recurrence.packed_layers import mask_of_steps
from exporters.recurrence.recurrent_steps import GRU, LSTM, MASKED, RELU, TANH
from exporters.recurrence.replacements import Replacement, Replacements
from profiles.errors import ExportError

aten = torch.ops.aten
STEPS = {
    aten.lstm.input: LSTM,
    aten.gru.input: GRU,
    aten.rnn_tanh.input: TANH,
    aten.rnn_relu.input: RELU,
    packed.lstm: LSTM,
    packed.gru: GRU,
    packed.rnn_tanh: TANH,
    packed.rnn_relu: RELU,
}
RECURRENT = tuple(STEPS)


@dataclass(frozen=True)
class Cell:
    """One layer in one direction: w_x (gates * n, i), w_h (gates * n, n), and 0 or 2 biases."""

    step: str
    w_x: Tensor
    w_h: Tensor
    biases: Sequence[Tensor]
    reverse: bool

    def run(
        self, x: Tensor, states: Sequence[Tensor], mask: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the layer over x (T, i, B), starting from states (n, B).

        `mask` is empty or has one tensor (T, 1, B). It is 1 for the steps that a sample has, else
        0. Returns the hidden states of all steps (T, n, B), and the list of the last states.
        """
        biases = [bias.unsqueeze(1) for bias in self.biases]
        # A GRU multiplies its second bias by r, so that the two cannot be added beforehand.
        if self.step != GRU and biases:
            biases = [biases[0] + biases[1]]
        constants = [self.w_x, self.w_h, *biases]
        name = MASKED + self.step if mask else self.step
        results = loop(name, list(states), [*mask, x], constants, self.reverse)
        return results[len(states)], results[: len(states)]


def run_recurrent_layers(
    layer: Any,
    x: Tensor,
    hx: Tensor | Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    *lengths: Tensor,
) -> tuple[Tensor, ...]:
    """Compute `layer`: `aten::lstm`, `aten::gru` or `aten::rnn_*`, with loops over time.

    All other arguments and results are the same as for the ATen operator. x is (T, B, i), or (B, T,
    i) if `batch_first` is set. Each state is (layers * directions, B, n). The operators for packed
    sequences also take the number of steps of each sample, (B,).

    Raises:
        ExportError: The LSTM has projections.
    """
    # Recording turns dropout between layers into separate operators (split_at_dropouts).
    assert not (train and dropout and num_layers > 1)
    states = [hx] if isinstance(hx, Tensor) else list(hx)
    per_cell = 4 if has_biases else 2
    directions = 2 if bidirectional else 1
    # Projections add one more weight to each cell.
    if len(params) != per_cell * num_layers * directions:
        raise lstm_projections()
    # Loops run on (T, features, batch); see recurrent_steps.py for the reason.
    x = x.permute(1, 2, 0) if batch_first else x.transpose(1, 2)
    mask = [mask_of_steps(x.shape[0], given).to(x.dtype).unsqueeze(1) for given in lengths]
    last = []
    for depth in range(num_layers):
        sequences = []
        for number in range(depth * directions, (depth + 1) * directions):
            # PyTorch orders parameters by layer, then direction: forward before backward.
            w_x, w_h, *biases = params[per_cell * number : per_cell * (number + 1)]
            cell = Cell(STEPS[layer], w_x, w_h, biases, reverse=number % directions == 1)
            sequence, final = cell.run(x, [state[number].t() for state in states], mask)
            sequences.append(sequence)
            last.append(final)
        x = sequences[0] if directions == 1 else torch.cat(sequences, 1)
    x = x.permute(2, 0, 1) if batch_first else x.transpose(1, 2)
    return x, *(torch.stack(column).transpose(1, 2) for column in zip(*last, strict=True))


def lstm_projections() -> ExportError:
    """The error for an LSTM with projections."""
    return ExportError(
        "The model has an LSTM with projections (proj_size), which cannot be exported. Remove "
        "proj_size and put a linear layer after the LSTM.",
        code="export.lstm-projections",
    )


def reshape(view: Any, x: Tensor, size: Sequence[int]) -> Tensor:
    """Reshape `x`. `view` may fail for the memory layout of a loop's results."""
    return x.reshape(size)


LOOPS: dict[Any, Replacement] = {
    **dict.fromkeys(STEPS, run_recurrent_layers),
    torch.ops.aten.view.default: reshape,
}


class RecurrenceLoops(Replacements):
    """Context that runs recurrent layers as loops. Tracing would unroll PyTorch's own operators."""

    def __init__(self) -> None:
        super().__init__(LOOPS)
