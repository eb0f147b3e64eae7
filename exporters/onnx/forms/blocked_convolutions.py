"""Convolutions in ONNX Runtime's blocked layout, and sums and ReLUs that they include.

A blocked convolution adds a vector and an image to its result and applies a ReLU in one pass.
"""

import numpy as np
import onnx_ir as ir
from onnx_ir import Node, Value

from exporters.onnx.forms.blocked_values import BlockedValues
from exporters.onnx.graph_reading import (
    DOMAIN,
    dims_of,
    is_all,
    numbers,
    sizes_of,
    swapped_pads,
    value_of,
)


def convolves(layout: BlockedValues, node: Node) -> bool:
    """Whether `node` is a convolution with a blocked form."""
    if node.op_type not in ("Conv", "ConvTranspose") or node.domain:
        return False
    if node.inputs[1] in layout.held:
        return False  # the runtime itself brings constants into the layout
    image, weight, result = dims_of(node.inputs[0]), dims_of(node.inputs[1]), node.outputs[0]
    if len(weight) != 4 or None in weight or not layout.fits(result) or len(image) != 4:
        return False
    attributes = numbers(node)
    groups, inputs = attributes["group"][0], image[1]
    if inputs is None or image[0] == 1:  # the gradient of a weight: its channels are the samples
        return False
    if node.op_type == "ConvTranspose":
        plain = set(attributes["strides"]) == {1} and not any(attributes["output_padding"])
        return plain and groups == 1 and inputs % layout.block == 0 and min(swapped_pads(node)) >= 0
    depthwise = groups == inputs == weight[0] != 1
    dense = groups == 1 and (inputs % layout.block == 0 or inputs < layout.block)
    return depthwise or dense


def convolution(layout: BlockedValues, node: Node) -> bool:
    """Convert a convolution.

    A transposed convolution becomes a plain convolution: the input and output channels of the
    weight are exchanged, and the kernel is flipped.
    """
    image, weight, *bias = node.inputs
    assert image is not None
    assert weight is not None
    attributes = {key: value for key, value in numbers(node).items() if key != "output_padding"}
    transposed = node.op_type == "ConvTranspose"
    if transposed:
        attributes["pads"] = swapped_pads(node)
    few = sizes_of(image)[1] % layout.block != 0
    again = (node.op_type, image, weight) in layout.convolutions
    layout.convolutions.add((node.op_type, image, weight))
    read = layout.plain if few else layout.read_again if again else layout.image
    inputs = [read(image), layout.filter(weight, transposed), *bias]
    result = node.outputs[0]
    return layout.computed(result, layout.convolved(result, inputs, attributes))


def scale_and_shift(layout: BlockedValues, node: Node) -> bool:
    """Convert a batch norm with mean 0 and variance 1, which computes x * scale + shift.

    Returns False for other batch norms.
    """
    value, scale, shift, mean, variance = node.inputs
    if value not in layout.images or not (is_all(mean, 0) and is_all(variance, 1)):
        return False
    if node.attributes["epsilon"].as_float() != 0:
        return False
    result = node.outputs[0]
    return layout.computed(result, layout.by_channel(result, layout.images[value], scale, shift))


def only_read(layout: BlockedValues, value: Value | None) -> Node | None:
    """Return the blocked convolution that computes `value`.

    Returns None if several nodes read `value`, or if it is not computed by a blocked convolution
    without a ReLU.
    """
    # Earlier readers of the plain form are no longer among the uses, but `restored` has `value`.
    if value not in layout.images or value in layout.restored or len(list(value.uses())) != 1:
        return None
    maker = layout.images[value].producer()
    fits = maker is not None and maker.domain == DOMAIN and maker.op_type == "Conv"
    return maker if fits and "activation" not in maker.attributes else None  # type: ignore[union-attr]


def activation(layout: BlockedValues, node: Node) -> bool:
    """Convert a ReLU if the convolution before it can compute it. Returns False otherwise."""
    (value,) = node.inputs
    maker = only_read(layout, value)
    if maker is None:
        return False
    maker.attributes["activation"] = ir.AttrString("activation", "Relu")
    return layout.computed(node.outputs[0], maker.outputs[0])


def image_sum(layout: BlockedValues, node: Node) -> bool:
    """Convert a sum of two images if the convolution that computes one can add the other."""
    left, right = node.inputs
    if left is right or dims_of(left)[1:] != dims_of(right)[1:]:
        return False
    for value, other in ((left, right), (right, left)):
        maker = only_read(layout, value)
        if maker is not None and other in layout.images and len(maker.inputs) < 4:
            missing = [None] * (3 - len(maker.inputs))
            return extended(layout, maker, node, [*missing, layout.images[other]])
    return False


def vector_sum(layout: BlockedValues, node: Node, value: Value, shift: Value) -> bool:
    """Convert value + shift if the convolution that computes `value` can add the vector `shift`.

    Returns False otherwise. Such a sum occurs if the backward pass computes the input of a batch
    norm again and subtracts the mean, which is known in the backward pass.
    """
    maker = only_read(layout, value)
    if maker is None or len(maker.inputs) > 2:
        return False
    return extended(layout, maker, node, [shift])


def extended(layout: BlockedValues, maker: Node, node: Node, inputs: list[Value | None]) -> bool:
    """Give the convolution `maker` more `inputs`, so that it computes the result of `node`."""
    layout.nodes.remove(maker)
    result = node.outputs[0]
    convolved = layout.convolved(result, [*maker.inputs, *inputs], numbers(maker))
    return layout.computed(result, convolved)


def scaled_summand(layout: BlockedValues, node: Node) -> bool:
    """If only a sum reads the product of an image and a number, convert it to a convolution.

    This convolution can also compute the sum (see `image_sum`). Returns False for other products.
    """
    value, result, readers = node.inputs[0], node.outputs[0], list(node.outputs[0].uses())
    number = value_of(node.inputs[1])
    if value not in layout.images or number is None or number.size != 1 or len(readers) != 1:
        return False
    if readers[0].node.op_type != "Add" or not layout.fits(result):
        return False
    scale = layout.constant(np.full(sizes_of(result)[1], number, np.float32))
    assert value is not None
    return layout.computed(result, layout.by_channel(result, layout.images[value], scale))
