"""Rewrites a training step for ONNX Runtime's blocked convolutions, with weights as inputs.

ONNX Runtime's fastest convolutions read images in a blocked layout, (N, C / b, H, W, b): b channels
side by side, 16 with AVX-512 and 8 with AVX2. It uses them by itself only if weights are constants.
But a graph may name its blocked operators: here weights are brought into their layout in the graph,
and images stay blocked from layer to layer.

In the graph a blocked tensor has the shape (N, C, H, W). Operators on single elements read it as it
is. Others see it as (N, C / b, H, W, b), which costs nothing.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir import Node, Value
from onnx_ir.passes.common import RemoveUnusedNodesPass

from device_agent.formats.graph_forms import BLOCKS
from exporters.memory.onnx_footprint import Footprint, footprint
from exporters.onnx.forms.blocked_elements import (
    ELEMENTWISE,
    UNARY,
    elementwise,
    keeps_at_random,
    unary,
)
from exporters.onnx.forms.blocked_pixels import PIXELS
from exporters.onnx.forms.blocked_strided_gradient import strided_gradient
from exporters.onnx.forms.blocked_sums import reduction
from exporters.onnx.forms.blocked_transposition import matrices
from exporters.onnx.forms.blocked_weight_gradient import gradient_of, weight_gradient
from exporters.onnx.forms.graph_rewriting import GraphRewriting, rewritten
from exporters.onnx.graph_reading import (
    DOMAIN,
    POINTWISE,
    before_swap,
    dims_of,
    is_all,
    numbers,
    swapped_pads,
    value_of,
)
from profiles.errors import ExportError

FIRST = -(2**31)
"""The end of a slice that runs backwards to the first element."""


def blocked(graph: bytes, block: int, batch: int) -> bytes | None:
    """The serialized ONNX `graph` with blocked convolutions; None if no convolution fits.

    It has the inputs and outputs of `graph`, and may write the same outputs in place. It runs in a
    runtime whose blocks have `block` channels; any other computes wrong numbers. It takes batches
    of any size, and is made for those of `batch` samples.
    """
    return rewritten(graph, way_to_rewrite(graph, block, batch))


def blocked_footprint(graph: bytes, block: int, batch: int) -> Footprint:
    """The memory that `blocked(graph, block, batch)` needs; errors as of `footprint`."""
    return footprint(graph, batch, way_to_rewrite(graph, block, batch))


@lru_cache(maxsize=len(BLOCKS))
def way_to_rewrite(graph: bytes, block: int, batch: int) -> Callable[[ir.Model], bool]:
    """`rewrite` for `graph`, with the dropouts that need less memory.

    Products with masks need two buffers less than selections, but with other buffers around them
    the gaps of the arena may be larger.
    """
    way = partial(rewrite, block=block, batch=batch)
    nodes = ir.from_proto(onnx.load_from_string(graph)).graph
    if not any(node.op_type == "Where" and keeps_at_random(node.inputs[0]) for node in nodes):
        return way
    selects = partial(way, multiplies=False)
    try:
        return min(way, selects, key=lambda one: footprint(graph, batch, one).arena)
    except ExportError:  # nothing is known about the memory
        return way


def rewrite(model: ir.Model, block: int, batch: int, multiplies: bool = True) -> bool:
    """Give `model` blocked convolutions; False if none fits. Shapes that are known stay known.

    `multiplies` says whether dropouts may become products with their masks.
    """
    fits = BlockedLayout(model.graph, block, batch, multiplies).rewrite()
    RemoveUnusedNodesPass()(model)
    if fits:
        model.opset_imports[DOMAIN] = 1
    return fits


def computed_from_constants(graph: ir.Graph) -> set[Value]:
    """The constants of `graph`, and what follows from them alone."""
    found = set(graph.initializers.values())
    for node in graph:
        if node.inputs and found.issuperset(node.inputs):
            found.update(node.outputs)
    return found


class BlockedLayout(GraphRewriting):
    """The rewriting of one graph; loops are left as they are.

    `images` has the blocked form of each value that has one, `dropped` the values whose plain form
    nobody computes any more, and `restored` the plain forms that were computed from blocked ones.
    """

    prefix = "blocked"

    def __init__(self, graph: ir.Graph, block: int, batch: int, multiplies: bool = True) -> None:
        super().__init__(graph)
        self.block = block
        self.batch = batch
        self.multiplies = multiplies
        self.held = computed_from_constants(graph)
        self.images: dict[Value, Value] = {}
        self.made_again: dict[Value, Value] = {}
        self.convolutions: set[tuple[str, Value, Value]] = set()
        self.dropped: set[Value] = set()
        self.restored: dict[Value, Value] = {}
        self.filters: dict[tuple[Value, bool], Value] = {}
        self.from_lengths: dict[object, Value] = {}
        self.lengths = {length for value in graph.inputs for length in value.shape or ()}
        # Read before the nodes between an image and the gradient are rewritten.
        self.gradients = {node: gradient_of(node) for node in graph}

    def convert(self, node: Node) -> bool:
        """Add what computes `node` on blocked tensors; False if it has to stay."""
        if self.convolves(node):
            return self.convolution(node)
        if node.op_type == "ConvTranspose":
            return strided_gradient(self, node)
        gradient = self.gradients.get(node)
        if gradient is not None:
            return weight_gradient(self, node, gradient)
        if node.op_type == "Transpose" and matrices(self, node):
            return True
        if not any(value in self.images for value in node.inputs):
            return False
        match node.op_type:
            case "BatchNormalization":
                return self.scale_and_shift(node)
            case "Relu" if self.activation(node):
                return True
            case "Add" if self.sum(node):
                return True
            case "Mul" if self.scaled_summand(node):
                return True
            case "ReduceMean" | "ReduceSum":
                return reduction(self, node)
            case kind if kind in PIXELS:
                return PIXELS[kind](self, node)
            case kind if kind in UNARY:
                return unary(self, node)
            case kind if kind in ELEMENTWISE:
                return elementwise(self, node)
        return False

    def keep(self, node: Node) -> None:
        """Leave `node` as it is, with plain inputs."""
        for place, value in enumerate(node.inputs):
            if value is not None:
                node.replace_input_with(place, self.plain(value))
        maker = node.inputs[0].producer() if node.op_type == "Reshape" and node.inputs[0] else None
        if maker is not None and maker.op_type == "Reshape":
            node.replace_input_with(0, maker.inputs[0])
        super().keep(node)

    # Values

    def image(self, value: Value) -> Value:
        """The blocked form of `value`."""
        if value not in self.images:
            self.images[value] = self.add("ReorderInput", [value], shape=value.shape, domain=DOMAIN)
        return self.images[value]

    def read_again(self, value: Value) -> Value:
        """The blocked form of `value` for the backward pass.

        An input of the graph is in memory anyway, so its blocked form is made a second time instead
        of being kept.
        """
        if not value.is_graph_input():
            return self.image(value)
        if value not in self.made_again:
            shape = value.shape
            self.made_again[value] = self.add("ReorderInput", [value], shape=shape, domain=DOMAIN)
        return self.made_again[value]

    def plain(self, value: Value) -> Value:
        """The plain form of `value`."""
        if value not in self.dropped:
            return value
        if value not in self.restored:
            channels = dims_of(value)[1]
            image = self.images[value]
            if value.dtype != ir.DataType.FLOAT:  # truth values have no reordering of their own
                image = self.add("Cast", [image], {"to": int(ir.DataType.FLOAT)}, shape=value.shape)
            found = self.add(
                "ReorderOutput",
                [image],
                {"channels": channels},
                shape=value.shape,
                domain=DOMAIN,
            )
            if value.dtype != ir.DataType.FLOAT:
                assert value.dtype is not None
                to = {"to": int(value.dtype)}
                found = self.add("Cast", [found], to, shape=value.shape, dtype=value.dtype)
            self.restored[value] = found
            self.images[found] = self.images[value]
        return self.restored[value]

    def computed(self, value: Value, image: Value) -> bool:
        """Note that `image` is the blocked form of `value`, which no node makes any more."""
        self.images[value] = image
        self.dropped.add(value)
        return True

    def apart(self, value: Value, image: Value) -> Value:
        """The blocked form `image` of `value` as (N, C / b, H, W, b)."""
        batch, channels, rows, columns = dims_of(value)
        assert channels is not None
        assert rows is not None
        assert columns is not None
        shape = (channels // self.block, rows, columns, self.block)
        return self.reshaped(image, -1, *shape, dims=(batch, *shape))

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

    # Convolutions

    def gains_from(self, node: Node) -> bool:
        """Whether `node` is a convolution with a blocked form."""
        return self.convolves(node)

    def convolves(self, node: Node) -> bool:
        """Whether `node` is a convolution with a blocked form."""
        if node.op_type not in ("Conv", "ConvTranspose") or node.domain:
            return False
        if node.inputs[1] in self.held:
            return False  # the runtime itself brings constants into the layout
        image, weight, result = dims_of(node.inputs[0]), dims_of(node.inputs[1]), node.outputs[0]
        if len(weight) != 4 or None in weight or not self.fits(result) or len(image) != 4:
            return False
        attributes = numbers(node)
        groups, inputs = attributes["group"][0], image[1]
        if inputs is None or image[0] == 1:  # the gradient of a weight: the batch are its channels
            return False
        if node.op_type == "ConvTranspose":
            plain = set(attributes["strides"]) == {1} and not any(attributes["output_padding"])
            return (
                plain and groups == 1 and inputs % self.block == 0 and min(swapped_pads(node)) >= 0
            )
        depthwise = groups == inputs == weight[0] != 1
        dense = groups == 1 and (inputs % self.block == 0 or inputs < self.block)
        return depthwise or dense

    def convolution(self, node: Node) -> bool:
        """A convolution; one that is transposed becomes a plain one, with its weight swapped."""
        image, weight, *bias = node.inputs
        assert image is not None
        assert weight is not None
        attributes = {key: value for key, value in numbers(node).items() if key != "output_padding"}
        transposed = node.op_type == "ConvTranspose"
        if transposed:
            attributes["pads"] = swapped_pads(node)
        few = dims_of(image)[1] % self.block != 0  # type: ignore[operator]
        again = (node.op_type, image, weight) in self.convolutions
        self.convolutions.add((node.op_type, image, weight))
        given = self.plain(image) if few else self.read_again(image) if again else self.image(image)
        inputs = [given, self.filter(weight, transposed), *bias]
        return self.computed(node.outputs[0], self.convolved(node.outputs[0], inputs, attributes))

    def turned(self, kernels: Value) -> Value:
        """`kernels` (.., .., H, W, ...) with rows and columns in reverse order."""
        back, end, axes = ([-1, -1], [FIRST, FIRST], [2, 3])
        steps = map(self.constant, (back, end, axes, back))
        return self.add("Slice", [kernels, *steps], shape=kernels.shape)

    def convolved(
        self, value: Value, inputs: Sequence[Value | None], attributes: Mapping[str, Sequence[int]]
    ) -> Value:
        """A blocked convolution that computes `value`. Inputs: image, filter, bias, summand."""
        settings = {**attributes, "group": attributes["group"][0]}
        return self.add("Conv", inputs, settings, shape=value.shape, domain=DOMAIN)

    def filter(self, weight: Value, swap: bool) -> Value:
        """The weight (O, I, *kernel) as (O / b, I / b, *kernel, b, b), inputs before outputs.

        With fewer than b inputs, also those of a depthwise convolution: (O / b, I, *kernel, b).
        With `swap` the weight is (I, O, *kernel), and its kernel is turned around.
        """
        inside = None if swap else before_swap(weight)
        if inside is not None:
            weight, swap = inside, True
        if (weight, swap) not in self.filters:
            b, kernel = self.block, [int(size or 0) for size in dims_of(weight)[2:]]
            first, second = (int(size or 0) for size in dims_of(weight)[:2])
            pixels, parts = math.prod(kernel), self.plain(weight)
            # The runtime reorders channels and moves a last axis several times faster than it
            # permutes six axes.
            if pixels > 1 and second % b == 0:
                parts = self.add("ReorderInput", [parts], shape=parts.shape, domain=DOMAIN)
            if not swap:
                found = self.permuted(self.reshaped(parts, first // b, b, second * pixels), 0, 2, 1)
            elif first % b:
                apart = self.reshaped(parts, first, second // b, pixels, b)
                found = self.permuted(apart, 1, 0, 2, 3)
            else:
                apart = self.reshaped(parts, first // b, b, second // b, pixels, b)
                found = self.permuted(apart, 2, 0, 3, 1, 4)
            if swap and pixels > 1:
                rows, tail = (first, b) if first % b else (first // b, b * b)
                found = self.reshaped(found, second // b, rows, *kernel, tail)
                found = self.turned(found)
            outer, inner = (second, first) if swap else (first, second)
            self.filters[weight, swap] = self.reshaped(found, outer, inner, *kernel)
        return self.filters[weight, swap]

    def by_channel(self, value: Value, image: Value, *vectors: Value | None) -> Value:
        """Compute image * scale + shift for vectors (C,), as a depthwise convolution of one pixel.

        It takes one pass, where a product and a sum that repeat vectors take two slower ones.
        """
        channels = int(dims_of(value)[1] or 0)
        scale, *shift = vectors
        if scale is None:
            weight = self.constant(np.ones((channels, 1, 1, 1), np.float32))
        else:
            weight = self.reshaped(scale, channels, 1, 1, 1)
        return self.convolved(value, [image, weight, *shift], {**POINTWISE, "group": [channels]})

    def scale_and_shift(self, node: Node) -> bool:
        """A batch norm with mean 0 and variance 1."""
        value, scale, shift, mean, variance = node.inputs
        if value not in self.images or not (is_all(mean, 0) and is_all(variance, 1)):
            return False
        if node.attributes["epsilon"].as_float() != 0:
            return False
        result = node.outputs[0]
        return self.computed(result, self.by_channel(result, self.images[value], scale, shift))

    def only_read(self, value: Value | None) -> Node | None:
        """The blocked convolution that makes `value`, if `value` has one reader."""
        # What read the plain form before is no longer among the uses.
        if value not in self.images or value in self.restored or len(list(value.uses())) != 1:
            return None
        maker = self.images[value].producer()
        fits = maker is not None and maker.domain == DOMAIN and maker.op_type == "Conv"
        return maker if fits and "activation" not in maker.attributes else None  # type: ignore[union-attr]

    def activation(self, node: Node) -> bool:
        """A ReLU that the convolution before it computes, too."""
        (value,) = node.inputs
        maker = self.only_read(value)
        if maker is None:
            return False
        maker.attributes["activation"] = ir.AttrString("activation", "Relu")
        return self.computed(node.outputs[0], maker.outputs[0])

    def sum(self, node: Node) -> bool:
        """A sum that the convolution of one summand computes, too."""
        left, right = node.inputs
        result = node.outputs[0]
        if left is right or dims_of(left)[1:] != dims_of(right)[1:]:
            return False
        for value, other in ((left, right), (right, left)):
            maker = self.only_read(value)
            if maker is not None and other in self.images and len(maker.inputs) < 4:
                self.nodes.remove(maker)
                missing = [None] * (3 - len(maker.inputs))
                inputs = [*maker.inputs, *missing, self.images[other]]
                return self.computed(result, self.convolved(result, inputs, numbers(maker)))
        return False

    def bias(self, node: Node, value: Value, shift: Value) -> bool:
        """A sum with the vector `shift` that the convolution of `value` computes, too.

        So a batch norm's image is made again for the backward pass, when its mean is known.
        """
        maker = self.only_read(value)
        if maker is None or len(maker.inputs) > 2:
            return False
        self.nodes.remove(maker)
        result = node.outputs[0]
        inputs = [*maker.inputs, shift]
        return self.computed(result, self.convolved(result, inputs, numbers(maker)))

    def scaled_summand(self, node: Node) -> bool:
        """A product by a number that is then added: as one convolution with the sum."""
        value, result, readers = node.inputs[0], node.outputs[0], list(node.outputs[0].uses())
        number = value_of(node.inputs[1])
        if value not in self.images or number is None or number.size != 1 or len(readers) != 1:
            return False
        if readers[0].node.op_type != "Add" or not self.fits(result):
            return False
        scale = self.constant(np.full(int(dims_of(result)[1] or 0), number, np.float32))
        assert value is not None
        return self.computed(result, self.by_channel(result, self.images[value], scale))
