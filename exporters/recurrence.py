"""LSTM, GRU and plain recurrent layers as loops over time, gradients included.

Only what must wait for the step before is in a loop. The products of all inputs with the input
weights, and backwards those that give the gradients of weights and inputs, are one large product
each.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from exporters.loops import Gradients, Loop, Step, loop, register

SMALLEST = 1e-20
"""Gradients that are carried back in time are rounded to multiples of about 1e-27, this times the
spacing of float32. They fade as they go, and processors are some ten times slower at numbers
below 1e-38, which are too small for float32's full precision."""


def rounded(gradient: Tensor) -> Tensor:
    """`gradient` with zeros in place of numbers next to nothing; see SMALLEST."""
    return (gradient + SMALLEST) - SMALLEST


def lstm(h: Tensor, c: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """c' = f c + i g and h' = o tanh(c') with (i, f, g, o) from x + h w.

    h, c (B, n), x (B, 4n), w (n, 4n). Outputs: h', then what the way back reads: i, f, g, o,
    tanh(c'), h and c, all (B, n).
    """
    i, f, g, o = torch.addmm(x, h, w).chunk(4, 1)
    i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
    new_c = f * c + i * g
    bent = torch.tanh(new_c)
    new_h = o * bent
    return new_h, new_c, new_h.clone(), i, f, g, o, bent, h.clone(), c.clone()


def lstm_back(
    d_h: Tensor,
    d_c: Tensor,
    i: Tensor,
    f: Tensor,
    g: Tensor,
    o: Tensor,
    bent: Tensor,
    c: Tensor,
    *rest: Tensor,
) -> tuple[Tensor, ...]:
    """From the gradients of h' and c' to those of h, c and x.

    `rest` is w^T (4n, n), after the gradient of the output h' (B, n) where that is read.
    """
    *read, w = rest
    d_h = d_h + read[0] if read else d_h
    d_bent = d_h * o
    d_c = d_c + (d_bent - d_bent * bent * bent)
    d_x = torch.cat(
        [
            d_c * g * (i - i * i),
            d_c * c * (f - f * f),
            d_c * (i - i * g * g),
            d_h * bent * (o - o * o),
        ],
        1,
    )
    return rounded(torch.mm(d_x, w)), rounded(d_c * f), d_x


def lstm_derivative(ran: Loop, gradients: Gradients) -> Gradients:
    """d_w is the sum over time of h^T d_x."""
    d_h, d_c, d_read = gradients[:3]
    *gates, h, c = ran.results[3:]
    states = [filled(d_h, ran.states[0]), filled(d_c, ran.states[1])]
    read = [] if d_read is None else [d_read]
    w = ran.constants[0].t()
    d_h, d_c, d_x = loop(LSTM_BACK, states, [*gates, c, *read], [w], not ran.reverse)
    return d_h, d_c, d_x, over_time(h, d_x)


def gru(h: Tensor, x: Tensor, w: Tensor, *bias: Tensor) -> tuple[Tensor, ...]:
    """h' = n + z (h - n), n = tanh(x_n + r u_n), r and z the sigmoids of x + u, u = h w + bias.

    h (B, n), x (B, 3n), w (n, 3n), bias (3n,). Outputs: h', then what the way back reads: r, z, n,
    u_n and h, all (B, n).
    """
    u = torch.addmm(bias[0], h, w) if bias else torch.mm(h, w)
    (x_r, x_z, x_n), (u_r, u_z, u_n) = x.chunk(3, 1), u.chunk(3, 1)
    r, z = torch.sigmoid(x_r + u_r), torch.sigmoid(x_z + u_z)
    n = torch.tanh(x_n + r * u_n)
    new = n + z * (h - n)
    return new, new.clone(), r, z, n, u_n.clone(), h.clone()


def gru_back(
    d_h: Tensor, r: Tensor, z: Tensor, n: Tensor, u: Tensor, h: Tensor, *rest: Tensor
) -> tuple[Tensor, ...]:
    """From the gradient of h' to those of h, x and h w + bias; `rest` as for the LSTM."""
    *read, w = rest
    d_h = d_h + read[0] if read else d_h
    kept = d_h * z
    d_n = (d_h - kept) * (1 - n * n)
    d_r = d_n * u * (r - r * r)
    d_z = d_h * (h - n) * (z - z * z)
    d_u = torch.cat([d_r, d_z, d_n * r], 1)
    return rounded(kept + torch.mm(d_u, w)), torch.cat([d_r, d_z, d_n], 1), d_u


def gru_derivative(ran: Loop, gradients: Gradients) -> Gradients:
    """d_w is the sum over time of h^T d_u, d_bias that of d_u."""
    d_h, d_read = gradients[:2]
    w, *bias = ran.constants
    read = [] if d_read is None else [d_read]
    states = [filled(d_h, ran.states[0])]
    d_h, d_x, d_u = loop(GRU_BACK, states, [*ran.results[2:], *read], [w.t()], not ran.reverse)
    return d_h, d_x, over_time(ran.results[-1], d_u), *(d_u.sum([0, 1]) for _ in bias)


def plain(bend: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """The step h' = bend(x + h w) of a plain recurrent layer; outputs: h' and h."""

    def step(h: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        new = bend(torch.addmm(x, h, w))
        return new, new.clone(), h.clone()

    return step


def plain_back(slope: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """The way back of `plain`, with the `slope` of its bend as a function of h'."""

    def step(d_h: Tensor, new: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        *read, w = rest
        d_x = (d_h + read[0] if read else d_h) * slope(new)
        return rounded(torch.mm(d_x, w)), d_x

    return step


def plain_derivative(name: str) -> Callable[[Loop, Gradients], Gradients]:
    """d_w is the sum over time of h^T d_x; `name` is that of the step back."""

    def derivative(ran: Loop, gradients: Gradients) -> Gradients:
        d_h, d_read, _ = gradients
        read = [] if d_read is None else [d_read]
        states, w = [filled(d_h, ran.states[0])], ran.constants[0].t()
        d_h, d_x = loop(name, states, [ran.results[1], *read], [w], not ran.reverse)
        return d_h, d_x, over_time(ran.results[2], d_x)

    return derivative


def filled(gradient: Tensor | None, like: Tensor) -> Tensor:
    """`gradient`, zeros where nothing reads the result."""
    return torch.zeros_like(like) if gradient is None else gradient


def over_time(left: Tensor, right: Tensor) -> Tensor:
    """Sum over t of left_t^T right_t: (T, B, n), (T, B, m) -> (n, m)."""
    return left.reshape(-1, left.shape[2]).t() @ right.reshape(-1, right.shape[2])


LSTM_BACK = register("lstm_back", Step(2, lstm_back))
LSTM = register("lstm", Step(2, lstm, lstm_derivative))
GRU_BACK = register("gru_back", Step(1, gru_back))
GRU = register("gru", Step(1, gru, gru_derivative))
TANH_BACK = register("rnn_tanh_back", Step(1, plain_back(lambda new: 1 - new * new)))
TANH = register("rnn_tanh", Step(1, plain(torch.tanh), plain_derivative(TANH_BACK)))
RELU_BACK = register("rnn_relu_back", Step(1, plain_back(lambda new: (new > 0).to(new.dtype))))
RELU = register("rnn_relu", Step(1, plain(torch.relu), plain_derivative(RELU_BACK)))
