"""The rule for LSTM, GRU and plain recurrent layers."""

import numpy as np

from toolkit.channels.channel_units import Axes, Axis
from toolkit.channels.operator_call import Layer, Rule, Step, Value, name_of, require_unchanged


def recurrent(step: Step) -> Value:
    """Drop features of a recurrent layer together with all their gates.

    The last states of all directions and stacked layers form one tensor. Therefore all of them drop
    the same features.
    """
    x, directions = step.axes("input"), 2 if step.argument("bidirectional") else 1
    tensors = [step.of(node) for node in step.argument("params")]
    layers = step.argument("num_layers") * directions
    size = len(tensors) // layers
    if size != (4 if step.argument("has_biases") else 2):
        return require_unchanged(step)  # An LSTM with projections has more tensors.
    states = [list(axes) for axes in map(step.of, initial_states(step))]
    hidden = states[0][-1]
    step.units.add_computed(hidden)
    for state in states:
        step.units.pin(state[0])  # layers and directions
        step.units.join(state[-1], hidden)
    inputs = x[-1]
    for number in range(layers):
        join_cell(step, tensors[size * number : size * (number + 1)], inputs, hidden)
        if (number + 1) % directions == 0:
            # The next layer reads the outputs of both directions.
            inputs = np.concatenate([hidden] * directions)
    name = name_of(step.argument("params")[0], step.node)
    # Several operators, one for each layer, may belong to one module.
    first = step.tracked.layers.get(name)
    step.tracked.layers[name] = Layer(x[-1] if first is None else first.inputs, inputs)
    return [(*x[:-1], inputs), *(tuple(state) for state in states)]


def initial_states(step: Step) -> list[object]:
    """The initial states, as a list: two for an LSTM, one for other layers."""
    given = step.argument("hx")
    return list(given) if isinstance(given, list | tuple) else [given]


def join_cell(step: Step, tensors: list[Axes], inputs: Axis, hidden: Axis) -> None:
    """Unite the axes of one layer and direction.

    Its tensors are weights (gates * h, i) and (gates * h, h), then two biases (gates * h,).
    """
    (rows, columns), (_, own), *_ = tensors
    step.units.join(columns, inputs)
    step.units.join(own, hidden)
    # Weights of all gates are stacked, gate after gate.
    gates = np.tile(hidden, len(rows) // len(hidden))
    for axes in tensors:
        step.units.join(axes[0], gates)


KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
RULES: dict[str, Rule] = dict.fromkeys(
    (*KINDS, *(f"edgetailor::packed_{kind}" for kind in KINDS)), recurrent
)
