"""Rules for matrix products and attention.

Both operands have the same channels along the axis that the product sums over. A narrower network
sums over fewer channels, as a linear layer does.
"""

import numpy as np

from toolkit.channels.channel_units import Axes, Axis
from toolkit.channels.elementwise_and_reduction_rules import unite_broadcast
from toolkit.channels.operator_call import Layer, Rule, Step, Value, name_of, require_unchanged


def product(step: Step, left: Axes, right: Axes) -> Axes:
    """(..., m, k) and (..., k, n) -> (..., m, n); the only axis of a vector is summed over."""
    column = len(right) == 1
    row = len(left) == 1
    step.units.join(left[-1], right[-1] if column else right[-2])
    if len(right) == 2:
        # The columns of a weight are channels that the product computes.
        step.units.add_computed(right[-1])
    batch = unite_broadcast(step, left[:-2], () if column else right[:-2])
    return (*batch, *(() if row else (left[-2],)), *(() if column else (right[-1],)))


def matmul(step: Step) -> Value:
    """The rule for `mm`, `bmm` and `matmul`: (..., m, k) and (..., k, n) -> (..., m, n)."""
    left, right = (step.of(node) for node in step.node.args[:2])
    return product(step, left, right)


def add_product(step: Step) -> Value:
    """`addmm` and `baddbmm`: bias + left @ right; the weight of a layer is (i, o)."""
    bias, left, right = (step.of(node) for node in step.node.args[:3])
    result = product(step, left, right)
    name = name_of(step.node.args[2], step.node)
    step.tracked.layers[name] = Layer(left[-1], right[-1])
    return unite_broadcast(step, bias, result)


def einsum(step: Step) -> Value:
    """Unite axes with the same letter. Letters that the result lacks are summed over."""
    equation = str(step.argument("equation")).replace(" ", "")
    operands = [step.of(node) for node in step.argument("tensors")]
    if "->" not in equation or "." in equation:
        return require_unchanged(step)
    inputs, result = equation.split("->")
    known: dict[str, Axis] = {}
    for letters, axes in zip(inputs.split(","), operands, strict=True):
        for letter, axis in zip(letters, axes, strict=True):
            step.units.join(known.setdefault(letter, axis), axis)
    for letters, axes in zip(inputs.split(","), operands, strict=True):
        if len(letters) == 2:
            for axis in axes:
                step.units.add_computed(axis)
    return tuple(known[letter] for letter in result)


def attention(step: Step) -> Value:
    """Query (..., h, t, d), key and value (..., g, s, d); the h heads share g keys and values."""
    query, key, value = (step.axes(name) for name in ("query", "key", "value"))
    step.units.join(query[-1], key[-1])
    step.units.join(key[-2], value[-2])
    if len(query) > 2 and len(key[-3]) not in (1, len(query[-3])):
        times = len(query[-3]) // len(key[-3])
        step.units.join(query[-3], np.repeat(key[-3], times))
        step.units.join(key[-3], value[-3])
        batch = (*unite_broadcast(step, query[:-3], key[:-3], value[:-3]), query[-3])
    else:
        batch = unite_broadcast(step, query[:-2], key[:-2], value[:-2])
    # The softmax combines all scores of a query.
    step.require_all(key[-2], "it combines all of them")
    mask = step.axes("attn_mask")
    unite_broadcast(step, (*batch, query[-2], key[-2]), mask)
    return (*batch, query[-2], value[-1])


RULES: dict[str, Rule] = {
    **dict.fromkeys(("mm", "bmm", "matmul"), matmul),
    **dict.fromkeys(("addmm", "baddbmm"), add_product),
    "einsum": einsum,
    "scaled_dot_product_attention": attention,
}
