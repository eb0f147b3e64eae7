"""The forward and backward steps of LSTM, GRU and plain recurrent layers.

All tensors of a step are (features, batch), so that weights are the left factor of every product.
Runtimes rearrange the right factor before they multiply, and here the right factor is the smaller
matrix. The gradient of each weight is computed after the loop, as one large product.

In the formulas, primes mark new values, and `d_x` is the gradient of x.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from exporters.recurrence.loop_operator import (
    STEPS,
    Gradients,
    Loop,
    Results,
    Step,
    loop,
    register,
)

SMALLEST = 1e-20
"""Gradients that go back from step to step are rounded to multiples of about 1e-27, which is this
number times the relative spacing of float32. Such gradients fade, and processors are about ten
times slower with subnormal numbers, which are below 1e-38."""


def flush_tiny(gradient: Tensor) -> Tensor:
    """Round tiny numbers in `gradient` to zero; see SMALLEST."""
    # The sum has no digits below SMALLEST * 1e-7, so the difference has none either.
    return (gradient + SMALLEST) - SMALLEST


def product(w: Tensor, x: Tensor, *bias: Tensor) -> Tensor:
    """Compute w x + bias."""
    return torch.addmm(bias[0], w, x) if bias else torch.mm(w, x)


def lstm(h: Tensor, c: Tensor, x: Tensor, w_x: Tensor, w_h: Tensor, *bias: Tensor) -> Results:
    """Forward step of an LSTM: c' = f c + i g and h' = o tanh(c').

    The gates (i, f, g, o) are functions of w_x x + w_h h + bias. Shapes: h, c (n, B), x (m, B),
    w_x (4n, m), w_h (4n, n), bias (4n, 1). Outputs: h', then the values that the backward step
    reads: i, f, g, o, tanh(c'), c and h, all (n, B).
    """
    i, f, g, o = product(w_h, h, product(w_x, x, *bias)).chunk(4)
    i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
    new_c = f * c + i * g
    tanh_c = torch.tanh(new_c)
    new_h = o * tanh_c
    # Clones, because each result of a step must be a new tensor (see `Step`).
    return new_h, new_c, new_h.clone(), i, f, g, o, tanh_c, c.clone(), h.clone()


def lstm_backward(
    d_h: Tensor,
    d_c: Tensor,
    i: Tensor,
    f: Tensor,
    g: Tensor,
    o: Tensor,
    tanh_c: Tensor,
    c: Tensor,
    *rest: Tensor,
) -> Results:
    """Backward step of an LSTM: gradients of h, c, x and of the sums in the gates.

    `d_h` and `d_c` are the gradients of h' and c'. `rest` has w_x^T (m, 4n) and w_h^T (n, 4n). If
    the model reads the output h', the gradient (n, B) of this output comes first in `rest`.
    """
    *d_output, w_x, w_h = rest
    d_h = d_h + d_output[0] if d_output else d_h
    d_tanh_c = d_h * o
    d_c = d_c + (d_tanh_c - d_tanh_c * tanh_c * tanh_c)
    d_i = d_c * g * (i - i * i)
    d_f = d_c * c * (f - f * f)
    d_g = d_c * (i - i * g * g)
    d_o = d_h * tanh_c * (o - o * o)
    d_sums = torch.cat([d_i, d_f, d_g, d_o])
    return flush_tiny(torch.mm(w_h, d_sums)), flush_tiny(d_c * f), torch.mm(w_x, d_sums), d_sums


def lstm_derivative(loop_run: Loop, gradients: Gradients) -> Gradients:
    """Gradients of an LSTM's loop. For weights and bias, they are sums over time and batch."""
    d_h, d_c, *d_read = gradients[:3]
    *gates, c, h = loop_run.results[3:]
    _, _, *bias = loop_run.constants
    *mask, x = loop_run.inputs
    *firsts, d_x, d_sums = run_back(LSTM_BACK, loop_run, [d_h, d_c], [*gates, c], d_read)
    d_bias = [d_sums.sum([0, 2]).unsqueeze(1) for _ in bias]
    d_w = sum_over_time(d_sums, x), sum_over_time(d_sums, h)
    return *firsts, *(None for _ in mask), d_x, *d_w, *d_bias


def gru(h: Tensor, x: Tensor, w_x: Tensor, w_h: Tensor, *biases: Tensor) -> Results:
    """Forward step of a GRU: h' = n + z (h - n), n = tanh(v_n + r u_n), r, z = sigmoid(v + u).

    v = w_x x + b_x and u = w_h h + b_h. Shapes: w_x (3n, m), w_h (3n, n), and two biases (3n, 1) or
    none. Outputs: h', then the values that the backward step reads: r, z, n, u_n and h, all (n, B).
    """
    v_r, v_z, v_n = product(w_x, x, *biases[:1]).chunk(3)
    u_r, u_z, u_n = product(w_h, h, *biases[1:]).chunk(3)
    r, z = torch.sigmoid(v_r + u_r), torch.sigmoid(v_z + u_z)
    n = torch.tanh(v_n + r * u_n)
    new = n + z * (h - n)
    return new, new.clone(), r, z, n, u_n.clone(), h.clone()


def gru_backward(
    d_h: Tensor, r: Tensor, z: Tensor, n: Tensor, u: Tensor, h: Tensor, *rest: Tensor
) -> Results:
    """Backward step of a GRU: gradients of h, x, v and u; `rest` is as in `lstm_backward`."""
    *d_output, w_x, w_h = rest
    d_h = d_h + d_output[0] if d_output else d_h
    kept = d_h * z
    d_n = (d_h - kept) * (1 - n * n)
    d_r = d_n * u * (r - r * r)
    d_z = d_h * (h - n) * (z - z * z)
    d_v, d_u = torch.cat([d_r, d_z, d_n]), torch.cat([d_r, d_z, d_n * r])
    return flush_tiny(kept + torch.mm(w_h, d_u)), torch.mm(w_x, d_v), d_v, d_u


def gru_derivative(loop_run: Loop, gradients: Gradients) -> Gradients:
    """Gradients of a GRU's loop: w_x and b_x follow from the gradient of v, w_h and b_h from u."""
    d_h, *d_read = gradients[:2]
    read, (_, _, *biases) = loop_run.results[2:], loop_run.constants
    *mask, x = loop_run.inputs
    first, d_x, d_v, d_u = run_back(GRU_BACK, loop_run, [d_h], read, d_read)
    d_biases = [d.sum([0, 2]).unsqueeze(1) for d in (d_v, d_u) if biases]
    d_w = sum_over_time(d_v, x), sum_over_time(d_u, loop_run.results[-1])
    return first, *(None for _ in mask), d_x, *d_w, *d_biases


def plain(activation: Callable[[Tensor], Tensor]) -> Callable[..., Results]:
    """Build the step h' = activation(w_x x + w_h h + bias) of a plain layer; outputs: h' and h."""

    def step(h: Tensor, x: Tensor, w_x: Tensor, w_h: Tensor, *bias: Tensor) -> Results:
        new = activation(product(w_h, h, product(w_x, x, *bias)))
        return new, new.clone(), h.clone()

    return step


def plain_backward(slope: Callable[[Tensor], Tensor]) -> Callable[..., Results]:
    """Build the backward step of `plain`; `slope` is the activation's derivative in terms of h'."""

    def step(d_h: Tensor, new: Tensor, *rest: Tensor) -> Results:
        *d_output, w_x, w_h = rest
        d_sum = (d_h + d_output[0] if d_output else d_h) * slope(new)
        return flush_tiny(torch.mm(w_h, d_sum)), torch.mm(w_x, d_sum), d_sum

    return step


def plain_derivative(name: str) -> Callable[[Loop, Gradients], Gradients]:
    """Build the derivative of a plain layer's loop; its backward step is registered as `name`."""

    def derivative(loop_run: Loop, gradients: Gradients) -> Gradients:
        d_h, *d_read = gradients[:2]
        new, h = loop_run.results[1:]
        _, _, *bias = loop_run.constants
        *mask, x = loop_run.inputs
        first, d_x, d_sum = run_back(name, loop_run, [d_h], [new], d_read)
        d_bias = [d_sum.sum([0, 2]).unsqueeze(1) for _ in bias]
        d_w = sum_over_time(d_sum, x), sum_over_time(d_sum, h)
        return first, *(None for _ in mask), d_x, *d_w, *d_bias

    return derivative


def run_back(
    name: str, loop_run: Loop, d_states: Gradients, read: list[Tensor], d_read: Gradients
) -> list[Tensor]:
    """Run the backward step `name` in the opposite direction. Its outputs are sorted by time.

    `d_states` and `d_read` are the gradients of the last states and of the output h'. They are None
    for results that nothing reads. `read` has the values that the forward steps have stored.
    """
    states = [or_zeros(d, state) for d, state in zip(d_states, loop_run.states, strict=True)]
    w_x, w_h, *_ = loop_run.constants
    *mask, _ = loop_run.inputs
    d_output = [d * mask[0] if mask else d for d in without_none(d_read)]
    inputs = [*mask, *read, *d_output]
    return list(
        loop(
            MASKED + name if mask else name,
            states,
            inputs,
            [w_x.t(), w_h.t()],
            not loop_run.reverse,
        )
    )


def masked(step: Step) -> Step:
    """Build a step whose first input is a mask (1, B) of ones and zeros.

    If the mask of a sample is 0, its states stay unchanged, and its first output is 0.
    """

    def function(*arguments: Tensor) -> Results:
        states, (m, *rest) = arguments[: step.states], arguments[step.states :]
        results = step.function(*states, *rest)
        new = [
            m * value + (1 - m) * old
            for value, old in zip(results[: step.states], states, strict=True)
        ]
        output, *kept = results[step.states :]
        return *new, m * output, *kept

    return Step(step.states, function, step.derivative)


def masked_back(step: Step) -> Step:
    """Build the backward step of `masked`. For samples with mask 0, gradients do not change."""

    def function(*arguments: Tensor) -> Results:
        d_states, (m, *rest) = arguments[: step.states], arguments[step.states :]
        results = step.function(*(m * d for d in d_states), *rest)
        firsts = [
            first + (1 - m) * d for first, d in zip(results[: step.states], d_states, strict=True)
        ]
        return *firsts, *results[step.states :]

    return Step(step.states, function)


def or_zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    """Return `gradient`, or zeros in the shape of `like` if it is None."""
    return torch.zeros_like(like) if gradient is None else gradient


def without_none(gradients: Gradients) -> list[Tensor]:
    """Return the entries of `gradients` that are not None."""
    return [gradient for gradient in gradients if gradient is not None]


def sum_over_time(left: Tensor, right: Tensor) -> Tensor:
    """Sum over t of left_t right_t^T: (T, n, B), (T, m, B) -> (n, m)."""
    rows = left.transpose(0, 1).reshape(left.shape[1], -1)
    return rows @ right.transpose(1, 2).reshape(-1, right.shape[1])


MASKED = "masked_"
"""Prefix of steps whose first input is a mask of the samples whose sequences have this step."""
LSTM_BACK = register("lstm_back", Step(2, lstm_backward))
LSTM = register("lstm", Step(2, lstm, lstm_derivative))
GRU_BACK = register("gru_back", Step(1, gru_backward))
GRU = register("gru", Step(1, gru, gru_derivative))
TANH_BACK = register("rnn_tanh_back", Step(1, plain_backward(lambda new: 1 - new * new)))
TANH = register("rnn_tanh", Step(1, plain(torch.tanh), plain_derivative(TANH_BACK)))
RELU_BACK = register("rnn_relu_back", Step(1, plain_backward(lambda new: (new > 0).to(new.dtype))))
RELU = register("rnn_relu", Step(1, plain(torch.relu), plain_derivative(RELU_BACK)))
for name in (LSTM, GRU, TANH, RELU):
    register(MASKED + name, masked(STEPS[name]))
for name in (LSTM_BACK, GRU_BACK, TANH_BACK, RELU_BACK):
    register(MASKED + name, masked_back(STEPS[name]))
