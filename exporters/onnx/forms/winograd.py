"""Rewrites 3 x 3 convolutions by Winograd's method, which needs fewer multiplications.

The method is F(2 x 2, 3 x 3) of Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks"
(2016). An image is cut into tiles of 4 x 4 pixels that overlap by two pixels. Each tile d gives 2 x
2 results,

    y = A^T [(G g G^T) * (B^T d B)] A,

for a kernel g. For each of the 16 positions in a tile, one product of matrices computes the sums
over channels for all tiles. A tile takes 16 multiplications instead of 36. The gradient of the
weight, which also takes 16 multiplications, is

    dg = G^T [(A dy A^T) * (B^T d B)] G,

summed over tiles.

The transforms need additional passes over memory. So the method is faster only for slow
convolutions with many channels, on devices without blocked convolutions; see `blocked_layout.py`.
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir import Node, Value
from onnx_ir.passes.common import RemoveUnusedNodesPass

from exporters.onnx.forms.graph_rewriting import GraphRewriting, rewritten
from exporters.onnx.graph_reading import (
    Gradient,
    before_swap,
    dims_of,
    gradient_of,
    numbers,
    sizes_of,
    swapped_pads,
)

B = np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]], np.float32).T
G = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], np.float32)
A = np.array([[1, 1, 1, 0], [0, 1, -1, -1]], np.float32).T
"""The matrices of the method, in the notation above."""
LEAST_CHANNELS = 32
"""With fewer input or output channels, the transforms take the time that the products save. In
WebAssembly, whole steps are faster with this limit than with 16 or 64."""
LEAST_PIXELS = 4
"""The smallest height and width of a result. Tiles would lie mostly outside of a smaller result."""
POSITIONS = 16
"""The number of pixels of a tile."""


def winograd(graph: bytes) -> bytes | None:
    """Rewrite the convolutions of the serialized ONNX `graph`. Returns None if none fits.

    The result has the inputs and outputs of `graph`, and may write the same outputs in place.
    """
    return rewritten(graph, rewrite)


def rewrite(model: ir.Model) -> bool:
    """Rewrite the convolutions of `model`. Returns False if none fits. Keeps all known shapes."""
    fits = Winograd(model.graph).rewrite()
    RemoveUnusedNodesPass()(model)
    return fits


class Tiles:
    """How a result of `rows` x `columns` pixels is covered by tiles of 2 x 2."""

    def __init__(self, rows: int, columns: int) -> None:
        self.high, self.wide = -(-rows // 2), -(-columns // 2)
        self.below, self.right = rows % 2, columns % 2
        self.count = self.high * self.wide


class Winograd(GraphRewriting):
    """Rewrites one graph by Winograd's method."""

    prefix = "winograd"

    def gains_from(self, node: Node) -> bool:
        """Whether this form computes `node`: a convolution, or the gradient of its weight."""
        return self.convolves(node) or self.gradient(node) is not None

    def convert(self, node: Node) -> bool:
        """Add nodes that compute `node` in this form. Returns False if `node` has to stay."""
        if self.convolves(node):
            return self.convolution(node)
        gradient = self.gradient(node)
        return gradient is not None and self.weight_gradient(node, gradient)

    def convolves(self, node: Node) -> bool:
        """Whether `node` is a convolution that this form computes."""
        if node.op_type not in ("Conv", "ConvTranspose") or node.domain:
            return False
        image, weight, result = map(dims_of, (*node.inputs[:2], node.outputs[0]))
        window = numbers(node)
        return (
            plain(window)
            and weight[2:] == (3, 3)
            and window["dilations"] == [1, 1]
            and enough(image, result)
            and min(pads_of(node)) >= 0
            and max(pads_of(node)) <= 2
        )

    def gradient(self, node: Node) -> Gradient | None:
        """If this form fits, return the gradient of a weight that `node` computes; else None."""
        gradient = gradient_of(node)
        fits = (
            gradient is not None
            and gradient.groups == 1
            and gradient.size == (3, 3)
            and gradient.strides == gradient.dilations == [1, 1]
            and enough(dims_of(gradient.image), dims_of(gradient.moved))
            and min(gradient.pads) >= 0
        )
        return gradient if fits else None

    def convolution(self, node: Node) -> bool:
        """Convert a convolution.

        A transposed convolution becomes a plain convolution: the input and output channels of the
        weight are exchanged, and the kernels are flipped.
        """
        image, weight, *bias = node.inputs
        assert image is not None
        assert weight is not None
        result = node.outputs[0]
        batch, (_, channels, rows, columns) = dims_of(result)[0], sizes_of(result)
        tiles = Tiles(rows, columns)
        kernels = self.kernels(weight, node.op_type == "ConvTranspose")
        sums = self.products(kernels, self.tiles(image, pads_of(node), tiles))
        sums = self.reshaped(sums, POSITIONS, -1, dims=(POSITIONS, count(channels, batch, tiles)))
        sums = self.products(self.constant(np.kron(A, A).T.copy()), sums)
        pixels = self.reshaped(
            sums, 4, channels, -1, tiles.count, dims=(4, channels, batch, tiles.count)
        )
        pixels = self.permuted(pixels, 2, 1, 0, 3)
        shape = (4 * channels, tiles.high, tiles.wide)
        pixels = self.reshaped(pixels, -1, *shape, dims=(batch, *shape))
        # This takes two thirds of the time of a permutation of six axes.
        convolved = self.add(
            "DepthToSpace",
            [pixels],
            {"blocksize": 2, "mode": "CRD"},
            shape=(batch, channels, 2 * tiles.high, 2 * tiles.wide),
        )
        if tiles.below or tiles.right:
            ends = [[0, 0], [rows, columns], [2, 3]]
            convolved = self.add(
                "Slice", [convolved, *map(self.constant, ends)], shape=result.shape
            )
        if bias and bias[0] is not None:
            per_channel = self.reshaped(bias[0], 1, channels, 1, 1)
            convolved = self.add("Add", [convolved, per_channel], shape=result.shape)
        return self.replaced(result, convolved)

    def weight_gradient(self, node: Node, gradient: Gradient) -> bool:
        """Convert the gradient of a weight.

        In the graph, the gradient has the shape (1, O, 3, 3 * I).
        """
        _, outputs, rows, columns = sizes_of(gradient.moved)
        inputs = sizes_of(gradient.image)[1]
        tiles = Tiles(rows, columns)
        images = self.tiles(gradient.image, gradient.pads, tiles)
        grads = self.transformed(gradient.moved, A, [0, 0, 0, 0], tiles)
        sums = self.products(images, self.permuted(grads, 0, 2, 1))
        sums = self.reshaped(sums, POSITIONS, inputs * outputs)
        sums = self.products(self.constant(np.kron(G, G).T.copy()), sums)
        weights = self.permuted(self.reshaped(sums, 3, 3, inputs, outputs), 3, 0, 1, 2)
        return self.replaced(node.outputs[0], self.reshaped(weights, 1, outputs, 3, 3 * inputs))

    def kernels(self, weight: Value, swap: bool) -> Value:
        """Compute G g G^T for all kernels of the weight (O, I, 3, 3), as (16, O, I).

        If `swap` is set, the weight is (I, O, 3, 3), and its kernels are flipped.
        """
        inside = None if swap else before_swap(weight)
        if inside is not None:
            weight, swap = inside, True
        first, second, *_ = sizes_of(weight)
        turned = G[:, ::-1] if swap else G
        # The runtime fuses these transpositions with the products.
        flat = self.permuted(self.reshaped(weight, first * second, 9), 1, 0)
        kernels = self.products(self.constant(np.kron(turned, turned)), flat)
        kernels = self.reshaped(kernels, POSITIONS, first, second)
        return self.permuted(kernels, 0, 2, 1) if swap else kernels

    def tiles(self, image: Value, pads: Sequence[int], tiles: Tiles) -> Value:
        """B^T d B for all tiles d of the padded `image` (N, C, H, W), as (16, C, N * tiles)."""
        return self.transformed(image, B.T.copy(), pads, tiles)

    def transformed(
        self, image: Value, matrix: np.ndarray, pads: Sequence[int], tiles: Tiles
    ) -> Value:
        """The transform of all tiles of `image`, as (16, C, N * tiles).

        `matrix` transforms one axis of a tile. The padding also adds pixels that no result needs,
        so that all tiles are complete.
        """
        batch, (_, channels, rows, columns) = dims_of(image)[0], sizes_of(image)
        size = matrix.shape[1]
        top, left, bottom, right = pads
        single = count(channels, batch)
        flat = self.reshaped(image, -1, 1, rows, columns, dims=(single, 1, rows, columns))
        kernel = np.kron(matrix, matrix).reshape(POSITIONS, 1, size, size)
        tiled = self.add(
            "Conv",
            [flat, self.constant(kernel)],
            {
                "kernel_shape": [size, size],
                "strides": [2, 2],
                "pads": [top, left, bottom + tiles.below, right + tiles.right],
            },
            shape=(single, POSITIONS, tiles.high, tiles.wide),
        )
        shape = (channels, POSITIONS, tiles.count)
        tiled = self.reshaped(tiled, -1, *shape, dims=(batch, *shape))
        tiled = self.permuted(tiled, 2, 1, 0, 3)
        sizes = (POSITIONS, channels)
        return self.reshaped(tiled, *sizes, -1, dims=(*sizes, count(1, batch, tiles)))

    def products(self, left: Value, right: Value) -> Value:
        """Multiply `left` and `right` as batches of matrices, which are in the last two axes."""
        shape = (*dims_of(left)[:-1], dims_of(right)[-1])
        return self.add("MatMul", [left, right], shape=shape)


def plain(window: dict[str, list[int]]) -> bool:
    """Whether a convolution has stride 1 and one group."""
    strides, more = set(window["strides"]), window.get("output_padding", [0])
    return strides == {1} and window["group"] == [1] and not any(more)


def enough(image: Sequence[int | None], result: Sequence[int | None]) -> bool:
    """Whether input and output of a convolution have enough channels and pixels for this form."""
    known = len(image) == len(result) == 4 and None not in (*image[1:], *result[1:])
    return (
        known
        and min(image[1] or 0, result[1] or 0) >= LEAST_CHANNELS
        and min(*map(int, result[2:])) >= LEAST_PIXELS  # type: ignore[arg-type]
    )


def pads_of(node: Node) -> list[int]:
    """The padding of the plain convolution that computes `node`: top, left, bottom, right."""
    transposed = node.op_type == "ConvTranspose"
    return swapped_pads(node) if transposed else numbers(node).get("pads", [0] * 4)


def count(channels: int, batch: int | None, tiles: Tiles | None = None) -> int | None:
    """Return batch * channels, times the number of `tiles` if given; None if `batch` is open."""
    return None if batch is None else batch * channels * (tiles.count if tiles else 1)
