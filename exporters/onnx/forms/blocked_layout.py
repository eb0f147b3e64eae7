"""Rewrites a training step for ONNX Runtime's blocked convolutions, with weights as inputs.

ONNX Runtime's fastest convolutions read images in a blocked layout, (N, C / b, H, W, b): b channels
side by side, 16 with AVX-512 and 8 with AVX2. The runtime itself uses these convolutions only if
weights are constants. But a graph can also contain the blocked operators. This module adds nodes
that bring weights into the blocked layout. Images stay in this layout from layer to layer.

In the graph, a blocked tensor has the shape (N, C, H, W). Operators on single elements read it with
this shape. For other operators, it is reshaped to (N, C / b, H, W, b), which takes no time.
"""

from collections.abc import Callable
from functools import partial

import onnx_ir as ir
from onnx_ir import Node
from onnx_ir.passes.common import RemoveUnusedNodesPass

from exporters.memory.onnx_footprint import SizedGraph
from exporters.onnx.forms.blocked_convolutions import (
    activation,
    convolution,
    convolves,
    image_sum,
    scale_and_shift,
    scaled_summand,
)
from exporters.onnx.forms.blocked_elements import (
    ELEMENTWISE,
    UNARY,
    elementwise,
    keeps_at_random,
    product_with_mask,
    unary,
)
from exporters.onnx.forms.blocked_pixels import PIXELS
from exporters.onnx.forms.blocked_strided_gradient import strided_gradient
from exporters.onnx.forms.blocked_sums import reduction
from exporters.onnx.forms.blocked_transposition import matrices
from exporters.onnx.forms.blocked_values import BlockedValues
from exporters.onnx.forms.blocked_weight_gradient import weight_gradient
from exporters.onnx.forms.graph_rewriting import rewritten
from exporters.onnx.graph_reading import DOMAIN, gradient_of
from profiles.errors import ExportError


def blocked(graph: bytes, block: int, batch: int) -> bytes | None:
    """Rewrite the serialized ONNX `graph` with blocked convolutions; None if no convolution fits.

    The result has the inputs and outputs of `graph`, and may write the same outputs in place. It
    needs a runtime whose blocks have `block` channels: with other blocks, a runtime computes wrong
    numbers. It accepts batches of any size, but is optimised for `batch` samples.
    """
    return rewritten(graph, way_to_rewrite(SizedGraph(graph, batch), block))


def way_to_rewrite(sized: SizedGraph, block: int) -> Callable[[ir.Model], bool]:
    """Return `rewrite` with the value of `multiplies` for which the graph needs less memory.

    If `multiplies` is true, dropouts become products with masks. Otherwise they stay selections.
    Products need two fewer buffers than selections, but they can cause larger gaps in the arena
    (the runtime's memory).
    """
    rewriting = partial(rewrite, block=block, batch=sized.batch)
    nodes = ir.from_proto(sized.opened).graph
    if not any(node.op_type == "Where" and keeps_at_random(node.inputs[0]) for node in nodes):
        return rewriting
    selects = partial(rewriting, multiplies=False)
    try:
        return min(rewriting, selects, key=lambda way: sized.footprint(way).arena)
    except ExportError:  # the memory cannot be predicted
        return rewriting


def rewrite(model: ir.Model, block: int, batch: int, multiplies: bool = True) -> bool:
    """Rewrite `model` with blocked convolutions. Returns False if none fits. Keeps known shapes.

    `multiplies` says whether dropouts may become products with their masks.
    """
    fits = BlockedLayout(model.graph, block, batch, multiplies).rewrite()
    RemoveUnusedNodesPass()(model)
    if fits:
        model.opset_imports[DOMAIN] = 1
    return fits


class BlockedLayout(BlockedValues):
    """Rewrites one graph: it chooses the rule that converts each node.

    `multiplies` says whether dropouts may become products with their masks.
    """

    def __init__(self, graph: ir.Graph, block: int, batch: int, multiplies: bool) -> None:
        super().__init__(graph, block, batch)
        self.multiplies = multiplies
        # Find these before the nodes between an image and the gradient are rewritten.
        self.gradients = {node: gradient_of(node) for node in graph}

    def gains_from(self, node: Node) -> bool:
        """Whether `node` is a convolution with a blocked form."""
        return convolves(self, node)

    def convert(self, node: Node) -> bool:
        """Add nodes that compute `node` on blocked tensors. Returns False if `node` has to stay."""
        if convolves(self, node):
            return convolution(self, node)
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
                return scale_and_shift(self, node)
            case "Relu" if activation(self, node):
                return True
            case "Add" if image_sum(self, node):
                return True
            case "Mul" if scaled_summand(self, node):
                return True
            case "Where" if self.multiplies and product_with_mask(self, node):
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
        """Keep `node` unchanged, with plain inputs."""
        for index, value in enumerate(node.inputs):
            if value is not None:
                node.replace_input_with(index, self.plain(value))
        maker = node.inputs[0].producer() if node.op_type == "Reshape" and node.inputs[0] else None
        if maker is not None and maker.op_type == "Reshape":
            node.replace_input_with(0, maker.inputs[0])
        super().keep(node)
