"""Brings images and weights into ONNX Runtime's blocked layout, and images out of it."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from exporters.onnx.forms.graph_rewriting import GraphRewriting
from exporters.onnx.graph_reading import DOMAIN, POINTWISE, Dims, before_swap, dims_of, sizes_of

FIRST = -(2**31)
"""The end of a slice that runs backwards to the first element."""


BLOCKED = "_blocked"
"""The suffix of the name of a value's blocked form, if its plain form is not computed."""


class BlockedValues(GraphRewriting):
    """The state and operations that the rules of the blocked layout share for one graph.

    Attributes:
        block: Channels in a block.
        batch: The number of samples of a full batch. Other batches are allowed, but may be slower.
        held: Values that are computed only from constants.
        images: The blocked form of each value that has a blocked form.
        made_again: A second blocked form of inputs of the graph, which the backward pass reads.
        dropped: Values whose plain form is no longer computed.
        restored: The plain form of each value that was computed from its blocked form.
        convolutions: (operator, image, weight) of each convolution that was converted so far.
        filters: The blocked form of each weight. The key also says whether channels are swapped.
        from_lengths: Values that are computed from the number of samples; see `blocked_batches.py`.
        lengths: All sizes that occur in the shapes of the graph's inputs.
    """

    prefix = "blocked"

    def __init__(self, graph: ir.Graph, block: int, batch: int) -> None:
        super().__init__(graph)
        self.block = block
        self.batch = batch
        self.held = computed_from_constants(graph)
        self.images: dict[Value, Value] = {}
        self.made_again: dict[Value, Value] = {}
        self.dropped: set[Value] = set()
        self.restored: dict[Value, Value] = {}
        self.convolutions: set[tuple[str, Value, Value]] = set()
        self.filters: dict[tuple[Value, bool], Value] = {}
        self.from_lengths: dict[object, Value] = {}
        self.lengths = {length for value in graph.inputs for length in value.shape or ()}

    # Reorderings

    def in_blocks(self, value: Value) -> Value:
        """Add a node that brings `value` into blocks."""
        return self.add("ReorderInput", [value], shape=value.shape, domain=DOMAIN)

    def out_of_blocks(self, image: Value, shape: Dims | ir.Shape | None, channels: int) -> Value:
        """Add a node that brings `image` out of blocks, as a value of this `shape`."""
        return self.add(
            "ReorderOutput", [image], {"channels": channels}, shape=shape, domain=DOMAIN
        )

    def image(self, value: Value) -> Value:
        """Return the blocked form of `value`. If there is none, add a node that computes it."""
        if value not in self.images:
            self.images[value] = self.in_blocks(value)
        return self.images[value]

    def read_again(self, value: Value) -> Value:
        """Return the blocked form of `value` for the backward pass.

        A graph input is always in memory. So its blocked form is computed a second time, which
        needs less memory than keeping the first blocked form.
        """
        if not value.is_graph_input():
            return self.image(value)
        if value not in self.made_again:
            self.made_again[value] = self.in_blocks(value)
        return self.made_again[value]

    def plain(self, value: Value) -> Value:
        """Return the plain form of `value`. If no node computes it, add such a node."""
        if value not in self.dropped:
            return value
        if value not in self.restored:
            image, is_float = self.images[value], value.dtype == ir.DataType.FLOAT
            if not is_float:  # ReorderOutput does not accept booleans
                image = self.add("Cast", [image], {"to": int(ir.DataType.FLOAT)}, shape=value.shape)
            plain = self.out_of_blocks(image, value.shape, sizes_of(value)[1])
            if not is_float:
                assert value.dtype is not None
                to = {"to": int(value.dtype)}
                plain = self.add("Cast", [plain], to, shape=value.shape, dtype=value.dtype)
            self.restored[value] = plain
            self.images[plain] = self.images[value]
        return self.restored[value]

    # Blocked forms

    def fits(self, value: Value | None) -> bool:
        """Whether `value` can have a blocked form."""
        shape = dims_of(value)
        return (
            value is not None
            and value.dtype in (ir.DataType.FLOAT, ir.DataType.BOOL)
            and len(shape) == 4
            and None not in shape[1:]
            and bool(shape[1])
            and shape[1] % self.block == 0  # type: ignore[operator]
        )

    def computed(self, value: Value, image: Value) -> bool:
        """Record that `image` is the blocked form of `value`, whose plain form is not computed."""
        image.name = f"{value.name}{BLOCKED}"
        self.images[value] = image
        self.dropped.add(value)
        return True

    def apart(self, value: Value, image: Value) -> Value:
        """Reshape `image`, the blocked form of `value`, to (N, C / b, H, W, b)."""
        _, channels, rows, columns = sizes_of(value)
        shape = (channels // self.block, rows, columns, self.block)
        return self.reshaped(image, -1, *shape, dims=(dims_of(value)[0], *shape))

    # Convolutions

    def convolved(
        self, value: Value, inputs: Sequence[Value | None], attributes: Mapping[str, Sequence[int]]
    ) -> Value:
        """Add a blocked convolution that computes `value`, and return its output.

        `inputs` are the image, the filter, the bias and an image to add. The bias and the image to
        add may be missing.
        """
        settings = {**attributes, "group": attributes["group"][0]}
        return self.add("Conv", inputs, settings, shape=value.shape, domain=DOMAIN)

    def by_channel(self, value: Value, image: Value, *vectors: Value | None) -> Value:
        """Compute image * scale + shift for vectors (C,), as a depthwise convolution of one pixel.

        The convolution takes one pass. A product and a sum with repeated vectors would take two
        slower passes.
        """
        channels = sizes_of(value)[1]
        scale, *shift = vectors
        if scale is None:
            weight = self.constant(np.ones((channels, 1, 1, 1), np.float32))
        else:
            weight = self.reshaped(scale, channels, 1, 1, 1)
        return self.convolved(value, [image, weight, *shift], {**POINTWISE, "group": [channels]})

    def turned(self, kernels: Value) -> Value:
        """Reverse the order of rows and columns of `kernels` (.., .., H, W, ...)."""
        back, end, axes = ([-1, -1], [FIRST, FIRST], [2, 3])
        steps = map(self.constant, (back, end, axes, back))
        return self.add("Slice", [kernels, *steps], shape=kernels.shape)

    def filter(self, weight: Value, swap: bool) -> Value:
        """Bring a weight (O, I, *kernel) into blocks: (O / b, I / b, *kernel, b, b).

        In each block of b x b numbers, the axis of inputs comes before the axis of outputs. For a
        depthwise convolution, or if there are fewer than b inputs, the result is (O / b, I,
        *kernel, b). If `swap` is set, `weight` has the shape (I, O, *kernel), and the kernel of the
        result is flipped.
        """
        inside = None if swap else before_swap(weight)
        if inside is not None:
            weight, swap = inside, True
        if (weight, swap) not in self.filters:
            b, (first, second, *kernel) = self.block, sizes_of(weight)
            pixels, parts = math.prod(kernel), self.plain(weight)
            # The runtime reorders channels and moves a last axis several times faster than it
            # permutes six axes.
            if pixels > 1 and second % b == 0:
                parts = self.in_blocks(parts)
            if not swap:
                parts = self.permuted(self.reshaped(parts, first // b, b, second * pixels), 0, 2, 1)
            elif first % b:
                apart = self.reshaped(parts, first, second // b, pixels, b)
                parts = self.permuted(apart, 1, 0, 2, 3)
            else:
                apart = self.reshaped(parts, first // b, b, second // b, pixels, b)
                parts = self.permuted(apart, 2, 0, 3, 1, 4)
            if swap and pixels > 1:
                rows, tail = (first, b) if first % b else (first // b, b * b)
                parts = self.turned(self.reshaped(parts, second // b, rows, *kernel, tail))
            outer, inner = (second, first) if swap else (first, second)
            self.filters[weight, swap] = self.reshaped(parts, outer, inner, *kernel)
        return self.filters[weight, swap]


def computed_from_constants(graph: ir.Graph) -> set[Value]:
    """The constants of `graph`, and the values that are computed only from constants."""
    constants = set(graph.initializers.values())
    for node in graph:
        if node.inputs and constants.issuperset(node.inputs):
            constants.update(node.outputs)
    return constants
