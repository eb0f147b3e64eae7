"""Reads shapes, windows, constants and earlier permutations from nodes of an ONNX graph."""

from typing import NamedTuple

import numpy as np
import onnx_ir as ir
from onnx_ir import Node, Value

DOMAIN = "com.microsoft.nchwc"
"""The domain of ONNX Runtime's blocked operators."""
Dims = tuple[int | None, ...]
"""The shape of a tensor; None for a size that is not known."""
CHANNELS_LAST = (0, 2, 3, 1)
POINTWISE = {"kernel_shape": [1, 1], "strides": [1, 1], "pads": [0] * 4, "dilations": [1, 1]}
"""The window of a 1 x 1 convolution with stride 1."""
SWAP = (1, 0, 2, 3)
"""The permutation that exchanges the input and output channels of a weight."""


class Gradient(NamedTuple):
    """The gradient of a layer's weight, which another convolution computes.

    The gradient has the shape (O, C / groups, *size). `moved` (N, O, H', W') is the kernel of the
    other convolution, and moves over `image` (N, C, H, W). Lengths are in pixels: `pads` around
    `image`, the `strides` by which `moved` moves, and `dilations` between the elements of `moved`.
    """

    image: Value
    moved: Value
    pads: list[int]
    strides: list[int]
    dilations: list[int]
    size: tuple[int, int]
    groups: int


def dims_of(value: Value | None) -> Dims:
    """The shape of `value`; empty if it is unknown."""
    if value is None or value.shape is None:
        return ()
    return tuple(size if isinstance(size, int) else None for size in value.shape.dims)


def sizes_of(value: Value | None) -> list[int]:
    """The shape of `value`, with 0 for a size that is not known."""
    return [size or 0 for size in dims_of(value)]


def numbers(node: Node) -> dict[str, list[int]]:
    """Map the names of a convolution's attributes (pads, group, ...) to lists of numbers."""
    unlike = ("auto_pad", "group")
    window = {k: list(v.as_ints()) for k, v in node.attributes.items() if k not in unlike}
    groups = node.attributes["group"].as_int() if "group" in node.attributes else 1
    return {**window, "group": [groups]}


def swapped_pads(node: Node) -> list[int]:
    """The padding of the plain convolution that can replace the transposed convolution `node`."""
    window, kernel = numbers(node), dims_of(node.inputs[1])[2:]
    spans = [d * (int(k or 0) - 1) for d, k in zip(window["dilations"], kernel, strict=True)]
    return [span - pad for span, pad in zip([*spans, *spans], window["pads"], strict=True)]


def swapped(value: Value | None) -> Value | None:
    """Return the tensor from which a Transpose of the first two axes computes `value`, or None."""
    swap = value.producer() if value is not None else None
    if swap is None or swap.op_type != "Transpose":
        return None
    return swap.inputs[0] if tuple(swap.attributes["perm"].as_ints()) == SWAP else None


def transposed(value: Value | None) -> Value | None:
    """The matrix from which a Transpose computes `value`; None if no Transpose computes it."""
    turn = value.producer() if value is not None else None
    if turn is None or turn.op_type != "Transpose":
        return None
    return turn.inputs[0] if tuple(turn.attributes["perm"].as_ints()) == (1, 0) else None


def rows_of(node: Node) -> tuple[Value | None, list[int]]:
    """Return the image (N, C, H, W) that the convolution `node` reads, and its padding.

    In the graph, the image is first rearranged to (1, groups * N, H, W * C / groups), with channels
    last. If `node` does not read such an image, the returned image is None.
    """
    pads, value = numbers(node).get("pads", [0] * 4), node.inputs[0]
    nothing = (None, pads)
    maker = value.producer() if value is not None else None
    if maker is not None and maker.op_type == "Pad":
        more = whole_numbers(maker.inputs[1])
        if len(more) != 8 or any(more[axis] for axis in (0, 1, 4, 5)):
            return nothing
        pads = [pad + further for pad, further in zip(pads, more[2:4] + more[6:], strict=True)]
        maker = maker.inputs[0].producer() if maker.inputs[0] is not None else None
    operators: list[tuple[str, tuple[int, ...]]] = [("Reshape", ()), ("Transpose", CHANNELS_LAST)]
    if numbers(node)["group"] != [1]:
        operators = [("Reshape", ()), ("Transpose", (1, 0, 3, 4, 2)), ("Reshape", ())]
    for operator, axes in operators:
        if maker is None or maker.op_type != operator:
            return nothing
        if axes and tuple(maker.attributes["perm"].as_ints()) != axes:
            return nothing
        value = maker.inputs[0]
        maker = value.producer() if value is not None else None
    return value, pads


def before_swap(weight: Value) -> Value | None:
    """If `weight` is a copy with swapped channels and a flipped kernel, return the original weight.

    Returns None if `weight` is not such a copy.
    """
    turn = weight.producer()
    if turn is None or turn.op_type != "Slice" or len(turn.inputs) < 5:
        return None
    *_, axes, steps = turn.inputs
    if whole_numbers(steps) != [-1, -1] or whole_numbers(axes) != [2, 3]:
        return None
    return swapped(turn.inputs[0])


def value_of(value: Value | None) -> np.ndarray | None:
    """The constant `value` as an array. None if `value` is not a constant."""
    known = ir.convenience.get_const_tensor(value) if value is not None else None
    return None if known is None else known.numpy()


def whole_numbers(value: Value | None) -> list[int]:
    """The elements of the integer constant `value`. Empty if `value` is not a constant."""
    array = value_of(value)
    return [] if array is None else [int(number) for number in array.reshape(-1)]


def is_all(value: Value | None, number: float) -> bool:
    """Whether `value` is a constant that repeats `number`."""
    array = value_of(value)
    return array is not None and bool((array == number).all())


def gradient_of(node: Node) -> Gradient | None:
    """Return the gradient that `node` computes.

    Returns None if `node` does not have the form in which `exporters/decompositions/convolution.py`
    writes gradients.
    """
    if node.op_type != "Conv" or node.domain or len(dims_of(node.outputs[0])) != 4:
        return None
    image, (top, left, bottom, right) = rows_of(node)
    moved, window = swapped(node.inputs[1]), numbers(node)
    _, _, high, wide = sizes_of(node.outputs[0])
    if image is None or moved is None or not (high and wide) or None in dims_of(image)[1:]:
        return None
    (groups,), (down, along) = window["group"], window["dilations"]
    pixel = sizes_of(image)[1] // groups
    if not pixel:
        return None
    return Gradient(
        image=image,
        moved=moved,
        pads=[top, left // pixel, bottom, right // pixel],
        strides=window["strides"],
        dilations=[down, along // pixel],
        size=(high, wide // pixel),
        groups=groups,
    )
