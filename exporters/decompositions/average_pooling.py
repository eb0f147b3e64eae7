"""Average pooling of images and volumes, forward and backward, for any window."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce

import torch
from torch import Tensor

from exporters.decompositions.decomposition import Decompositions, constant
from exporters.decompositions.strided_slices import stuff

aten = torch.ops.aten
PLAIN = {2: aten.avg_pool2d.default, 3: aten.avg_pool3d.default}
"""Pooling operator by number of axes. Without padding, all runtimes agree on its result."""


@dataclass(frozen=True)
class Windows:
    """Pooling windows along one axis.

    Attributes:
        size: Elements of the axis.
        kernel: Elements of a window.
        step: Distance between the starts of two windows.
        front: Padding in front of the axis. The first window starts at -front.
        ceil_mode: Whether a last window may end outside of the padded axis.
    """

    size: int
    kernel: int
    step: int
    front: int
    ceil_mode: bool

    @property
    def count(self) -> int:
        """Number of windows. In ceil mode, the last window may end outside of the axis."""
        room = self.size + 2 * self.front - self.kernel
        count = (-(-room // self.step) if self.ceil_mode else room // self.step) + 1
        # As in PyTorch, a window that starts in the padding behind the axis does not count.
        outside = (count - 1) * self.step >= self.size + self.front
        return count - 1 if self.ceil_mode and outside else count

    @property
    def behind(self) -> int:
        """How many elements the last window extends beyond the axis."""
        return (self.count - 1) * self.step + self.kernel - self.front - self.size

    def divisors(self, include_pad: bool) -> list[int]:
        """The number by which the sum of each window is divided."""
        low, high = (-self.front, self.size + self.front) if include_pad else (0, self.size)
        starts = [index * self.step - self.front for index in range(self.count)]
        return [min(start + self.kernel, high) - max(start, low) for start in starts]


def windows(
    x: Tensor, kernel: list[int], stride: list[int], padding: list[int], ceil_mode: bool, axes: int
) -> list[Windows]:
    """The windows along each of the last `axes` axes of `x`; a single size applies to all axes."""
    kernel, padding = several(kernel, axes), several(padding, axes)
    steps = several(stride, axes) if stride else kernel
    return [
        Windows(int(size), length, step, front, ceil_mode)
        for size, length, step, front in zip(x.shape[-axes:], kernel, steps, padding, strict=True)
    ]


def several(sizes: Sequence[int], axes: int) -> list[int]:
    """Repeat a single size for each axis."""
    return list(sizes) * axes if len(sizes) == 1 else list(sizes)


def average_pool(
    x: Tensor,
    kernel: list[int],
    stride: list[int] = [],  # noqa: B006 - ATen's schema
    padding: list[int] = [0],  # noqa: B006
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    axes: int,
) -> Tensor:
    """y = mean over each window of the zero-padded `x`, times kernel size / divisor of the window.

    Runtimes use different divisors at edges, so the division is corrected here. Returns
    NotImplemented for pooling without padding, because runtimes compute this correctly.
    """
    along = windows(x, kernel, stride, padding, ceil_mode, axes)
    if divisor_override is None and not any(w.front or ceil_mode for w in along):
        return NotImplemented  # type: ignore[no-any-return]
    frame = [n for w in reversed(along) for n in (w.front, max(w.behind, 0))]
    pooled = plain(aten.constant_pad_nd(x, frame) if any(frame) else x, along)
    return corrected(pooled, along, count_include_pad, divisor_override)


def average_pool_backward(
    grad: Tensor,
    x: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
    *,
    axes: int,
) -> Tensor:
    """dX[i] = sum of grad[o] / divisor of o, over the windows o that contain i.

    If windows do not overlap, each value of `grad` is repeated. Otherwise, the sum is computed by
    another pooling: insert stride - 1 zeros after each element of `grad`, then average-pool with
    stride 1.
    """
    along = windows(x, kernel, stride, padding, ceil_mode, axes)
    grad = corrected(grad, along, count_include_pad, divisor_override)
    # Windows side by side: every element belongs to exactly one window.
    if all(w.step == w.kernel for w in along):
        total = repeated(grad * (1 / math.prod(w.kernel for w in along)), along)
        edges = [n for w in reversed(along) for n in (-w.front, -w.behind)]
        return aten.constant_pad_nd(total, edges) if any(edges) else total
    steps = [w.step for w in along]
    spaced = stuff(grad, steps) if steps != [1] * axes else grad
    frame: list[int] = []
    for w in reversed(along):
        frame += [w.kernel - 1 - w.front, w.size + w.front - w.count * w.step]
    return plain(aten.constant_pad_nd(spaced, frame), along, [1] * axes)


def plain(x: Tensor, along: list[Windows], steps: list[int] | None = None) -> Tensor:
    """Average pooling of `x` without padding."""
    steps = steps or [w.step for w in along]
    return PLAIN[len(along)](x, [w.kernel for w in along], steps)  # type: ignore[no-any-return]


def corrected(
    means: Tensor, along: list[Windows], include_pad: bool, divisor: int | None
) -> Tensor:
    """Turn `means` over whole windows into each window's sum divided by the window's divisor."""
    whole = math.prod(w.kernel for w in along)
    if divisor is not None:
        return means * (whole / divisor)
    counts = [w.divisors(include_pad) for w in along]
    if all(count == [w.kernel] * w.count for count, w in zip(counts, along, strict=True)):
        return means
    parts = [constant([1.0 * n for n in count], dtype=means.dtype) for count in counts]
    # The divisors of windows in several axes are the outer product of those along each axis.
    elements = reduce(lambda product, part: product.unsqueeze(-1) * part, parts)
    return means * (whole / elements)


def repeated(x: Tensor, along: list[Windows]) -> Tensor:
    """Repeat each element of the last axes `kernel` times."""
    lead, tail = list(x.shape[: -len(along)]), list(x.shape[-len(along) :])
    for axis in range(len(along)):
        x = x.unsqueeze(x.dim() - 2 * axis)  # from the last axis to the first
    pairs = [n for size, w in zip(tail, along, strict=True) for n in (size, w.kernel)]
    sizes = [size * w.kernel for size, w in zip(tail, along, strict=True)]
    return x.expand([*lead, *pairs]).reshape([*lead, *sizes])


DECOMPOSITIONS: Decompositions = {
    aten.avg_pool2d.default: partial(average_pool, axes=2),
    aten.avg_pool3d.default: partial(average_pool, axes=3),
    aten.avg_pool2d_backward.default: partial(average_pool_backward, axes=2),
    aten.avg_pool3d_backward.default: partial(average_pool_backward, axes=3),
}
