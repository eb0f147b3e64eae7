"""Single steps of recurrent layers, such as `nn.LSTMCell`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from exporters.recurrence.replacements import Replacement

State = tuple[Tensor, Tensor]


def gates(
    input: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None
) -> tuple[Tensor, Tensor]:
    """Two terms of all gates of a cell: one computed from the input, one from the state."""
    return functional.linear(input, w_ih, b_ih), functional.linear(h, w_hh, b_hh)


def lstm_cell(_: Any, input: Tensor, hx: State, *weights: Any, **named: Any) -> State:
    """A step of `nn.LSTMCell`."""
    h, c = hx
    from_x, from_h = gates(input, h, *weights, **named)
    i, f, g, o = (from_x + from_h).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru_cell(_: Any, input: Tensor, hx: Tensor, *weights: Any, **named: Any) -> Tensor:
    """A step of `nn.GRUCell`."""
    both = gates(input, hx, *weights, **named)
    (rx, zx, nx), (rh, zh, nh) = (value.chunk(3, -1) for value in both)
    n = (nx + (rx + rh).sigmoid() * nh).tanh()
    return n + (zx + zh).sigmoid() * (hx - n)


def rnn_cell(nonlinearity: Callable[[Tensor], Tensor]) -> Replacement:
    """A step of `nn.RNNCell` with this `nonlinearity`."""

    def cell(_: Any, input: Tensor, hx: Tensor, *weights: Any, **named: Any) -> Tensor:
        from_x, from_h = gates(input, hx, *weights, **named)
        return nonlinearity(from_x + from_h)

    return cell


RECURRENT_CELLS: dict[Any, Replacement] = {
    torch.lstm_cell: lstm_cell,
    torch.gru_cell: gru_cell,
    torch.rnn_tanh_cell: rnn_cell(torch.tanh),
    torch.rnn_relu_cell: rnn_cell(torch.relu),
}
"""Maps a function of torch to the function that is recorded in its place."""
