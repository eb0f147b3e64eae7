"""Gradients of convolutions as convolutions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exporters.decompositions.decomposition import Decomposition, Decompositions
from exporters.decompositions.strided_slices import cut

aten = torch.ops.aten


@dataclass(frozen=True)
class Window:
    """How a convolution's kernel moves.

    Each list has one entry per axis: in 2-D, height and width.
    """

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    def of_line(self) -> "Window":
        """Return this window in 2-D, for lines that are treated as images with one row."""
        return Window([1, *self.stride], [0, *self.padding], [1, *self.dilation], self.groups)

    def convolution(
        self,
        x: Tensor,
        weight: Tensor,
        output_padding: list[int] | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Convolve `x`. If `output_padding` is given, compute the transposed convolution."""
        result: Tensor = aten.convolution(
            x,
            weight,
            bias,
            self.stride,
            self.padding,
            self.dilation,
            output_padding is not None,
            output_padding or [0] * len(self.stride),
            self.groups,
        )
        return result


Rewriting = Callable[[Tensor, Tensor, Tensor | None, Window, list[int] | None], Tensor]
"""Maps (x, weight, bias, window, output padding) to a convolution's result, or to NotImplemented.

The output padding of a plain convolution is None."""


def convolution_by(rewriting: Rewriting) -> Decomposition:
    """Build a decomposition of `aten.convolution` from `rewriting`, which gets a `Window`."""

    def convolution(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        is_transposed: bool,
        output_padding: list[int],
        groups: int,
    ) -> Tensor:
        window = Window(stride, padding, dilation, groups)
        return rewriting(x, weight, bias, window, output_padding if is_transposed else None)

    return convolution


WeightGradient = Callable[[Tensor, Tensor, Tensor, Window], Tensor]
"""Maps (grad, x, weight, window) to dW, all with two spatial dimensions."""


def backward_with(weight_gradient: WeightGradient) -> Decomposition:
    """Build a decomposition of `aten.convolution_backward` that uses `weight_gradient` for dW."""

    def convolution_backward(
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        bias_sizes: list[int] | None,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        transposed: bool,
        output_padding: list[int],
        groups: int,
        output_mask: list[bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of `x`, `weight` and bias for an output gradient `grad` (N, O, *out).

        `x` is (N, I, *in) with one or two spatial dimensions. `weight` is (O, I / groups, *kernel),
        or (I, O / groups, *kernel) for a transposed convolution. Returns NotImplemented for three
        spatial dimensions.
        """
        if x.dim() not in (3, 4):
            return NotImplemented  # type: ignore[no-any-return]
        bias = grad.sum([0, *range(2, grad.dim())]) if output_mask[2] else None
        window = Window(stride, padding, dilation, groups)
        # One spatial dimension is computed as two with a height of 1.
        line = x.dim() == 3
        if line:
            grad, x, weight = grad.unsqueeze(2), x.unsqueeze(2), weight.unsqueeze(2)
            window = window.of_line()
        input_gradient_of = transposed_input_gradient if transposed else input_gradient
        # A transposed convolution is the gradient of a convolution: its dW exchanges the roles of
        # image and gradient.
        moved, image = (x, grad) if transposed else (grad, x)
        d_x = input_gradient_of(grad, x, weight, window) if output_mask[0] else None
        d_w = weight_gradient(moved, image, weight, window) if output_mask[1] else None
        if line:
            d_x = None if d_x is None else d_x.squeeze(2)
            d_w = None if d_w is None else d_w.squeeze(2)
        return d_x, d_w, bias

    return convolution_backward


def input_gradient(grad: Tensor, x: Tensor, weight: Tensor, window: Window) -> Tensor:
    """dX = the transposed convolution of `grad` with the same weight and window.

    The output padding is the number of elements at the end of `x` that no window covers.
    """
    left = [
        int(x.shape[2 + axis])
        - (int(grad.shape[2 + axis]) - 1) * window.stride[axis]
        - window.dilation[axis] * (int(weight.shape[2 + axis]) - 1)
        - 1
        + 2 * window.padding[axis]
        for axis in (0, 1)
    ]
    return window.convolution(grad, weight, left)


def transposed_input_gradient(grad: Tensor, x: Tensor, weight: Tensor, window: Window) -> Tensor:
    """dX of a transposed convolution: the plain convolution of `grad` with the same weight.

    The result is larger than `x` if the output padding is at least the stride. PyTorch allows this
    for convolutions with dilation.
    """
    d_x = window.convolution(grad, weight)
    # Cut off the elements that an output padding of at least a stride adds.
    for axis in (2, 3):
        if d_x.shape[axis] != x.shape[axis]:
            d_x = d_x.narrow(axis, 0, x.shape[axis])
    return d_x


def weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, window: Window) -> Tensor:
    """dW as one convolution. Its image is `x` or `grad`. The one with fewer channels is used.

    Runtimes copy the image window by window into a matrix. The size of this matrix is the size of
    the image times the number of kernel elements.
    """
    plain = window.stride == window.dilation == [1, 1] and window.groups == 1
    if plain and grad.shape[1] < x.shape[1]:
        return sliding_gradient(grad, x, weight, window)
    return sliding_input(grad, x, weight, window)


def sliding_input(grad: Tensor, x: Tensor, weight: Tensor, window: Window) -> Tensor:
    """dW as one convolution whose kernel is `grad` and whose image is `x` with channels last.

    dW[o, i, a, b] = sum over n, u, v of grad[n, o, u, v] * x[n, i, s u + d a - p, s v + d b - p].
    The samples n become the channels, over which a convolution sums. A row of the image contains
    all I channels of each pixel, so a step of one pixel is a dilation of I. A row of the result
    contains (b, i). The layer's stride s becomes the dilation of this convolution, and the layer's
    dilation d becomes its stride.
    """
    outputs, inputs, rows, columns = weight.shape
    pads: list[int] = []
    for axis in (1, 0):
        front = window.padding[axis]
        span = window.dilation[axis] * (weight.shape[2 + axis] - 1)
        covered = window.stride[axis] * (grad.shape[2 + axis] - 1) + span + 1
        pads += [front, covered - front - x.shape[2 + axis]]
    result = convolve(
        channels_last(x, window.groups),
        grad.transpose(0, 1),
        [pads[0] * inputs, pads[1] * inputs, *pads[2:]],
        stride=[window.dilation[0], 1],
        dilation=[window.stride[0], window.stride[1] * inputs],
        groups=window.groups,
    )
    result = result.reshape(outputs, rows, -1, inputs)
    # A stride of `dilation` pixels would be dilation * I elements, which would skip channels. So
    # the result is computed for every pixel and sliced here.
    if window.dilation[1] > 1:
        result = cut(result, 2, 0, window.dilation[1], columns)
    # Runtimes exchange two axes several times faster than they permute four.
    result = result.reshape(outputs, rows * columns, inputs).transpose(1, 2)
    return result.reshape(outputs, inputs, rows, columns)


def sliding_gradient(grad: Tensor, x: Tensor, weight: Tensor, window: Window) -> Tensor:
    """dW for stride 1 as one convolution whose kernel is `x`, as in `sliding_input`.

    dW[o, i, a, b] = sum over n, j, k of x[n, i, j, k] * grad[n, o, j + p - a, k + p - b]. For a
    kernel of A rows, this is a convolution with padding A - 1 - p whose result has its rows (and
    columns) in reverse order.
    """
    outputs, inputs, rows, columns = weight.shape
    high, wide = rows - 1 - window.padding[0], columns - 1 - window.padding[1]
    result = convolve(
        channels_last(grad, 1),
        x.transpose(0, 1),
        [wide * outputs, wide * outputs, high, high],
        dilation=[1, outputs],
    )
    result = result.reshape(inputs, rows, columns, outputs).flip([1, 2])
    return result.reshape(-1, outputs).transpose(0, 1).reshape(outputs, inputs, rows, columns)


def channels_last(x: Tensor, groups: int) -> Tensor:
    """Rearrange (N, groups * C, H, W) to (1, groups * N, H, W * C)."""
    batch, channels, rows, columns = x.shape
    if groups == 1:
        last = x.permute(0, 2, 3, 1)
    else:
        last = x.reshape(batch, groups, -1, rows, columns).permute(1, 0, 3, 4, 2)
    return last.reshape(1, groups * batch, rows, columns * (channels // groups))


def convolve(
    x: Tensor,
    weight: Tensor,
    pads: list[int],
    stride: Sequence[int] = (1, 1),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    """A 2-D convolution with `pads` [left, right, top, bottom]. Negative pads crop the image."""
    # The operator pads both sides alike; other paddings need a separate operator.
    symmetric = pads[0] == pads[1] >= 0 and pads[2] == pads[3] >= 0
    if not symmetric:
        x = aten.constant_pad_nd(x, pads)
    padding = [pads[2], pads[0]] if symmetric else [0, 0]
    return aten.convolution(  # type: ignore[no-any-return]
        x, weight, None, list(stride), padding, list(dilation), False, [0, 0], groups
    )


DECOMPOSITIONS: Decompositions = {aten.convolution_backward.default: backward_with(weight_gradient)}
