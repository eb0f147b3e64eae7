"""The steps of LSTM, GRU and plain recurrent layers, forth and back.

All tensors of a step are (features, batch), so that weights stand on the left of every product:
runtimes rearrange the right-hand matrix before they multiply, and here that is the small one.
Gradients of weights wait until the loop is over and are one large product each.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from exporters.recurrence.loop_operator import Gradients, Loop, Results, Step, loop, register

SMALLEST = 1e-20
"""Gradients that are carried back in time are rounded to multiples of about 1e-27, this times the
spacing of float32. They fade as they go, and processors are some ten times slower at numbers
below 1e-38, which are too small for float32's full precision."""


def rounded(gradient: Tensor) -> Tensor:
    """`gradient` with zeros in place of numbers next to nothing; see SMALLEST."""
    return (gradient + SMALLEST) - SMALLEST


def product(w: Tensor, x: Tensor, *bias: Tensor) -> Tensor:
    """w x + bias."""
    return torch.addmm(bias[0], w, x) if bias else torch.mm(w, x)


def lstm(h: Tensor, c: Tensor, x: Tensor, w_x: Tensor, w_h: Tensor, *bias: Tensor) -> Results:
    """c' = f c + i g and h' = o tanh(c') with (i, f, g, o) from w_x x + w_h h + bias.

    h, c (n, B), x (m, B), w_x (4n, m), w_h (4n, n), bias (4n, 1). Outputs: h', then what the way
    back reads: i, f, g, o, tanh(c'), c and h, all (n, B).
    """
    i, f, g, o = product(w_h, h, product(w_x, x, *bias)).chunk(4)
    i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
    new_c = f * c + i * g
    bent = torch.tanh(new_c)
    new_h = o * bent
    return new_h, new_c, new_h.clone(), i, f, g, o, bent, c.clone(), h.clone()


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
) -> Results:
    """From the gradients of h' and c' to those of h, c, x and the gates' sums.

    `rest` is w_x^T (m, 4n) and w_h^T (n, 4n), after the gradient of the output h' (n, B) where that
    is read.
    """
    *read, w_x, w_h = rest
    d_h = d_h + read[0] if read else d_h
    d_bent = d_h * o
    d_c = d_c + (d_bent - d_bent * bent * bent)
    d_i = d_c * g * (i - i * i)
    d_f = d_c * c * (f - f * f)
    d_g = d_c * (i - i * g * g)
    d_o = d_h * bent * (o - o * o)
    d_sums = torch.cat([d_i, d_f, d_g, d_o])
    return rounded(torch.mm(w_h, d_sums)), rounded(d_c * f), torch.mm(w_x, d_sums), d_sums


def lstm_derivative(ran: Loop, gradients: Gradients) -> Gradients:
    """The gradients of weights and bias are sums over time and batch."""
    d_h, d_c, *d_read = gradients[:3]
    *gates, c, h = ran.results[3:]
    states = [filled(d_h, ran.states[0]), filled(d_c, ran.states[1])]
    w_x, w_h, *bias = ran.constants
    read = [*gates, c, *present(d_read)]
    results = loop(LSTM_BACK, states, read, [w_x.t(), w_h.t()], not ran.reverse)
    *firsts, d_x, d_sums = results
    d_bias = [d_sums.sum([0, 2]).unsqueeze(1) for _ in bias]
    return *firsts, d_x, over_time(d_sums, ran.inputs[0]), over_time(d_sums, h), *d_bias


def gru(h: Tensor, x: Tensor, w_x: Tensor, w_h: Tensor, *biases: Tensor) -> Results:
    """h' = n + z (h - n), n = tanh(v_n + r u_n), r and z the sigmoids of v + u.

    v = w_x x + b_x and u = w_h h + b_h; w_x (3n, m), w_h (3n, n), biases (3n, 1) both or none.
    Outputs: h', then what the way back reads: r, z, n, u_n and h, all (n, B).
    """
    v_r, v_z, v_n = product(w_x, x, *biases[:1]).chunk(3)
    u_r, u_z, u_n = product(w_h, h, *biases[1:]).chunk(3)
    r, z = torch.sigmoid(v_r + u_r), torch.sigmoid(v_z + u_z)
    n = torch.tanh(v_n + r * u_n)
    new = n + z * (h - n)
    return new, new.clone(), r, z, n, u_n.clone(), h.clone()


def gru_back(
    d_h: Tensor, r: Tensor, z: Tensor, n: Tensor, u: Tensor, h: Tensor, *rest: Tensor
) -> Results:
    """From the gradient of h' to those of h, x, v and u; `rest` as for the LSTM."""
    *read, w_x, w_h = rest
    d_h = d_h + read[0] if read else d_h
    kept = d_h * z
    d_n = (d_h - kept) * (1 - n * n)
    d_r = d_n * u * (r - r * r)
    d_z = d_h * (h - n) * (z - z * z)
    d_v, d_u = torch.cat([d_r, d_z, d_n]), torch.cat([d_r, d_z, d_n * r])
    return rounded(kept + torch.mm(w_h, d_u)), torch.mm(w_x, d_v), d_v, d_u


def gru_derivative(ran: Loop, gradients: Gradients) -> Gradients:
    """As for the LSTM, from v for the weights and bias of x, from u for those of h."""
    d_h, *d_read = gradients[:2]
    states, read = [filled(d_h, ran.states[0])], [*ran.results[2:], *present(d_read)]
    w_x, w_h, *biases = ran.constants
    results = loop(GRU_BACK, states, read, [w_x.t(), w_h.t()], not ran.reverse)
    d_h, d_x, d_v, d_u = results
    d_biases = [d.sum([0, 2]).unsqueeze(1) for d in (d_v, d_u) if biases]
    d_w = over_time(d_v, ran.inputs[0]), over_time(d_u, ran.results[-1])
    return d_h, d_x, *d_w, *d_biases


def plain(bend: Callable[[Tensor], Tensor]) -> Callable[..., Results]:
    """The step h' = bend(w_x x + w_h h + bias) of a plain recurrent layer; outputs: h' and h."""

    def step(h: Tensor, x: Tensor, w_x: Tensor, w_h: Tensor, *bias: Tensor) -> Results:
        new = bend(product(w_h, h, product(w_x, x, *bias)))
        return new, new.clone(), h.clone()

    return step


def plain_back(slope: Callable[[Tensor], Tensor]) -> Callable[..., Results]:
    """The way back of `plain`, with the `slope` of its bend as a function of h'."""

    def step(d_h: Tensor, new: Tensor, *rest: Tensor) -> Results:
        *read, w_x, w_h = rest
        d_sum = (d_h + read[0] if read else d_h) * slope(new)
        return rounded(torch.mm(w_h, d_sum)), torch.mm(w_x, d_sum), d_sum

    return step


def plain_derivative(name: str) -> Callable[[Loop, Gradients], Gradients]:
    """As for the LSTM; `name` is that of the step back."""

    def derivative(ran: Loop, gradients: Gradients) -> Gradients:
        d_h, *d_read = gradients[:2]
        states, read = [filled(d_h, ran.states[0])], [ran.results[1], *present(d_read)]
        w_x, w_h, *bias = ran.constants
        results = loop(name, states, read, [w_x.t(), w_h.t()], not ran.reverse)
        d_h, d_x, d_sum = results
        d_bias = [d_sum.sum([0, 2]).unsqueeze(1) for _ in bias]
        d_w = over_time(d_sum, ran.inputs[0]), over_time(d_sum, ran.results[2])
        return d_h, d_x, *d_w, *d_bias

    return derivative


def filled(gradient: Tensor | None, like: Tensor) -> Tensor:
    """`gradient`, zeros where nothing reads the result."""
    return torch.zeros_like(like) if gradient is None else gradient


def present(gradients: Gradients) -> list[Tensor]:
    """Those of `gradients` that there are."""
    return [gradient for gradient in gradients if gradient is not None]


def over_time(left: Tensor, right: Tensor) -> Tensor:
    """Sum over t of left_t right_t^T: (T, n, B), (T, m, B) -> (n, m)."""
    rows = left.transpose(0, 1).reshape(left.shape[1], -1)
    return rows @ right.transpose(1, 2).reshape(-1, right.shape[1])


LSTM_BACK = register("lstm_back", Step(2, lstm_back))
LSTM = register("lstm", Step(2, lstm, lstm_derivative))
GRU_BACK = register("gru_back", Step(1, gru_back))
GRU = register("gru", Step(1, gru, gru_derivative))
TANH_BACK = register("rnn_tanh_back", Step(1, plain_back(lambda new: 1 - new * new)))
TANH = register("rnn_tanh", Step(1, plain(torch.tanh), plain_derivative(TANH_BACK)))
RELU_BACK = register("rnn_relu_back", Step(1, plain_back(lambda new: (new > 0).to(new.dtype))))
RELU = register("rnn_relu", Step(1, plain(torch.relu), plain_derivative(RELU_BACK)))
