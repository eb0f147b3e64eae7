"""Gradients of the weights of convolutions, computed by blocked convolutions."""

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

import numpy as np
from onnx_ir import Node, Value

from exporters.onnx.forms.blocked_batches import WHOLE, batch_of, count_of, filled
from exporters.onnx.forms.blocked_depthwise_gradient import depthwise_gradient
from exporters.onnx.forms.blocked_values import BlockedValues
from exporters.onnx.graph_reading import DOMAIN, Gradient, dims_of, sizes_of

LARGEST_KERNEL = 2**18
"""The most numbers in a part of the kernel. The runtime reads a part many times, and a larger part
does not stay in a cache of 1 MB."""
PART = 4
"""Blocks of outputs that the runtime computes at the same time."""
MOST_OUTPUTS = 256
"""With more outputs, the plain convolution is faster although it makes copies."""
MOST_WASTED = 0.25
"""The most samples of zeros that may be added to fill the last block, as a share of the samples.
With more zeros, the plain convolution is faster."""
SHARED_ROWS = 4
"""If threads can share fewer rows of results, each half of the batch gets its own rows."""
LONG_ROW = 16
"""If a row of channels has this many numbers, gathering single rows is as fast as merging."""


class Cut(NamedTuple):
    """Describes the input channels of a convolution that computes a gradient.

    The convolution sums over its input channels. Each input channel is a sample, or a strip of rows
    of a sample.

    Attributes:
        halves: 2 if the channels are split into two groups with separate sums, else 1.
        strips: Number of strips into which the rows of a sample are cut.
        unit: Samples are added until the number of samples is a multiple of `unit`.
    """

    halves: int
    strips: int
    unit: int


def weight_gradient(layout: BlockedValues, node: Node, gradient: Gradient) -> bool:
    """Replace `node`, which computes `gradient`, by a blocked convolution; False if impossible."""
    # If a value is neither blocked nor read, another value has replaced it.
    if any(v not in layout.images and not v.uses() for v in (gradient.image, gradient.moved)):
        return False
    if gradient.groups == 1:
        value = dense_gradient(layout, gradient)
    else:
        value = depthwise_gradient(layout, gradient, dims_of(node.outputs[0]))
    return value is not None and layout.replaced(node.outputs[0], value)


def dense_gradient(layout: BlockedValues, gradient: Gradient) -> Value | None:
    """Return the gradient (1, O, H, W * C) of the weight of a convolution with one group.

    Returns None if there is no blocked form, or if the plain convolution is faster.
    """
    image, moved = gradient.image, gradient.moved
    point = gradient.size == (1, 1) and dims_of(image)[2:] == dims_of(moved)[2:]
    if not point:
        strips = strips_of(layout, moved, layout.block)
        if (
            strips is None
            or -layout.batch * strips % layout.block > MOST_WASTED * layout.batch * strips
        ):
            return None
        return sliding_gradient(layout, gradient, strips)
    channels, outputs = sizes_of(image)[1], sizes_of(moved)[1]
    if channels <= outputs:
        return point_gradient(layout, image, moved)
    # Compute the same sums with the larger tensor as the kernel, because the kernel is copied less.
    transposed = point_gradient(layout, moved, image)
    if transposed is None:
        return None
    turned = layout.permuted(layout.reshaped(transposed, channels, outputs), 1, 0)
    return layout.reshaped(turned, 1, outputs, 1, channels)


def strips_of(layout: BlockedValues, kernel: Value, samples: int) -> int | None:
    """The number of strips of rows into which `kernel` is cut, so that its parts fit the cache.

    Each part has as many numbers as `samples` samples. Returns None if a plain convolution is
    faster.
    """
    _, outputs, high, wide = sizes_of(kernel)
    part = min(outputs, PART * layout.block) * high * wide * samples
    if not layout.fits(kernel) or outputs > MOST_OUTPUTS:
        return None
    return next((n for n in divisors(high) if part <= LARGEST_KERNEL * n), None)


def divisors(number: int) -> list[int]:
    """The divisors of `number`, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def point_gradient(layout: BlockedValues, image: Value, kernel: Value) -> Value | None:
    """Return the gradient (1, O, 1, C) of a layer with a 1 x 1 kernel: products of the two images.

    `kernel` (the second image) becomes the filters of a convolution. A convolution sums over its
    input channels. Here, b neighbouring pixels of a sample, or of half a sample, become b input
    channels. With these channels, the numbers of `kernel` are already in the order of filters. Only
    the batch axis moves.
    """
    b, batch = layout.block, dims_of(image)[0]
    (_, channels, high, wide), outputs = sizes_of(image), sizes_of(kernel)[1]
    pixels, parts = high * wide, channels // b
    few = parts * -(-outputs // (PART * b)) < SHARED_ROWS
    halves = 2 if few and pixels % (2 * b) == 0 else 1
    if not layout.fits(image) or strips_of(layout, kernel, 1) != 1 or pixels % b:
        return None
    column, known = pixels // (halves * b), None if batch is None else batch * b
    runs = batch and batch * parts * halves * column
    rows = layout.reshaped(layout.read_again(image), -1, b, 1, b, dims=(runs, b, 1, b))
    rows = layout.in_blocks(rows)
    apart = (parts, halves, column * b, b)
    rows = layout.reshaped(rows, -1, *apart, dims=(batch, *apart))
    if parts * halves > 1:
        rows = layout.permuted(rows, 1, 2, 0, 3, 4)
    sizes = (parts, known and known * halves, column, b)
    rows = layout.reshaped(rows, parts, -1, column, b, dims=sizes)
    cut = (outputs // b, halves, column * b, b)
    filters = layout.reshaped(layout.image(kernel), -1, *cut, dims=(batch, *cut))
    filters = layout.permuted(filters, 2, 1, 0, 3, 4)
    sizes = (halves * outputs, known, column, 1)
    filters = layout.reshaped(filters, halves * outputs, -1, column, 1, dims=sizes)
    sums = correlation(layout, rows, filters, (parts, halves * outputs, 1, b), group=halves)
    return joined(layout, sums, halves, outputs, 1, b)


def sliding_gradient(layout: BlockedValues, gradient: Gradient, strips: int) -> Value:
    """Return the gradient of a layer with a larger kernel, by the same sums as in `convolution.py`.

    The convolution sums over its input channels. Its input channels are the samples, or the
    `strips` of rows of each sample. An image of C / b blocks becomes C / b images (N, H, W * b),
    which are distributed to threads.
    """
    outputs, (high, wide) = sizes_of(gradient.moved)[1], gradient.size
    rows, pixel = in_rows(layout, gradient.image)
    parts = sizes_of(rows)[0]
    few = parts * -(-outputs // (PART * layout.block)) * high < SHARED_ROWS
    halves = 2 if few and layout.batch * strips % (2 * layout.block) == 0 else 1
    filled_blocks = halves * layout.block
    unit = filled_blocks // gcd(filled_blocks, strips)
    rows = padded_rows(layout, rows, gradient, pixel, unit)
    rows = in_strips(layout, rows, gradient, strips)
    filters = as_filters(layout, gradient, Cut(halves, strips, unit))
    down, along = gradient.dilations
    sums = correlation(
        layout,
        layout.in_blocks(rows),
        filters,
        (parts, halves * outputs, high, wide * pixel),
        strides=gradient.strides,
        dilations=[down, along * pixel],
        group=halves,
    )
    return joined(layout, sums, halves, outputs, high, pixel)


def correlation(
    layout: BlockedValues,
    rows: Value,
    filters: Value,
    shape: tuple[int, ...],
    strides: Sequence[int] = (1, 1),
    dilations: Sequence[int] = (1, 1),
    group: int = 1,
) -> Value:
    """Convolve blocked `rows` with blocked `filters`. The result has the plain layout."""
    window = {"pads": [0] * 4, "strides": strides, "dilations": dilations, "group": group}
    sums = layout.add("Conv", [rows, filters], window, shape=shape, domain=DOMAIN)
    return layout.out_of_blocks(sums, shape, shape[1])


def joined(
    layout: BlockedValues, sums: Value, halves: int, outputs: int, high: int, pixel: int
) -> Value:
    """Join partial gradients (C / c, halves * O, H, W * c) to one gradient (1, O, H, W * C).

    The halves are added. The C / c parts are put side by side along the channels.
    """
    parts, _, _, wide = sizes_of(sums)
    if halves > 1:
        apart = layout.reshaped(sums, parts, halves, outputs * high * wide)
        axes, sizes = layout.constant([1]), (parts, outputs * high * wide)
        sums = layout.add("ReduceSum", [apart, axes], {"keepdims": 0}, shape=sizes)
    if parts > 1:
        apart = layout.reshaped(sums, parts, outputs, high * wide // pixel, pixel)
        sums = layout.permuted(apart, 1, 2, 0, 3)
    return layout.reshaped(sums, 1, outputs, high, wide * parts)


def in_rows(layout: BlockedValues, image: Value) -> tuple[Value, int]:
    """Return `image` as (C / c, N, H, W * c), and c.

    c is the number of channels of a pixel that are side by side.
    """
    batch, (_, pixel, high, wide) = dims_of(image)[0], sizes_of(image)
    parts = 1
    # A value that is computed again may have no blocked form yet, although the original has one. It
    # gets one here, so that sums have the same order as in a step that computes nothing again.
    if layout.fits(image):
        pixel, parts = layout.block, pixel // layout.block
        rows = layout.apart(image, layout.read_again(image))
        if parts > 1:
            rows = layout.permuted(rows, 1, 0, 2, 3, 4)
    else:
        rows = layout.permuted(image, 0, 2, 3, 1)
    sizes = (high, wide * pixel)
    return layout.reshaped(rows, parts, -1, *sizes, dims=(parts, batch, *sizes)), pixel


def padded_rows(
    layout: BlockedValues, rows: Value, gradient: Gradient, pixel: int, unit: int
) -> Value:
    """Pad the `rows` (C / c, N, H, W * c), and add samples of zeros up to a multiple of `unit`.

    For windows that extend over an edge, the runtime would be several times slower without padding.
    """
    top, left, bottom, right = gradient.pads
    pads = [0, 0, top, left * pixel, 0, 0, bottom, right * pixel]
    batch = batch_of(layout, gradient.image, gradient.moved)
    return with_whole_samples(layout, rows, 1, pads, unit, batch)


def in_strips(layout: BlockedValues, rows: Value, gradient: Gradient, strips: int) -> Value:
    """Cut the `rows` (C / c, N, H, W * c) into strips, (C / c, N * strips, h, W * c).

    `gradient.moved` is also cut into strips. While a strip of `gradient.moved` moves over the
    image, it covers more rows than it has. A strip of `rows` contains all covered rows, so strips
    of `rows` overlap.
    """
    if strips == 1:
        return rows
    batch, (parts, _, high, wide) = dims_of(rows)[1], sizes_of(rows)
    lines = sizes_of(gradient.moved)[2] // strips
    (down, _), (step, _) = gradient.dilations, gradient.strides
    length = (lines - 1) * down + (gradient.size[0] - 1) * step + 1
    read = (np.arange(strips)[:, None] * lines * down + np.arange(length)).ravel()
    if len(read) != high:
        shape = (parts, batch, len(read), wide)
        rows = layout.add("Gather", [rows, layout.constant(read)], {"axis": 2}, shape=shape)
    dims = (parts, batch and batch * strips, length, wide)
    return layout.reshaped(rows, parts, -1, length, wide, dims=dims)


def with_whole_samples(
    layout: BlockedValues, value: Value, axis: int, pads: Sequence[int], unit: int, batch: object
) -> Value:
    """Pad `value` by `pads`, and lengthen `axis` with zeros until it is a multiple of `unit`.

    `pads` are as in `padded`. `batch` is the key for the length of `axis`; see `batch_of`.
    """
    behind, size = len(pads) // 2 + axis, dims_of(value)
    key = (batch, unit, behind, *pads)
    if key not in layout.from_lengths:
        less = layout.add("Neg", [count_of(layout, value, axis)], shape=(1,), dtype=WHOLE)
        more = layout.add("Mod", [less, layout.constant([unit])], shape=(1,), dtype=WHOLE)
        ends = [layout.constant(pads[:behind]), more, layout.constant(pads[behind + 1 :])]
        layout.from_lengths[key] = layout.add(
            "Concat", ends, {"axis": 0}, shape=(len(pads),), dtype=WHOLE
        )
    around = layout.from_lengths[key]
    edges = zip(size, pads[: len(size)], pads[len(size) :], strict=True)
    shape = [None if length is None else length + sum(ends) for length, *ends in edges]
    shape[axis] = filled(size[axis], unit)
    return layout.add("Pad", [value, around], shape=tuple(shape))


def as_filters(layout: BlockedValues, gradient: Gradient, cut: Cut) -> Value:
    """Turn `gradient.moved` (N, O, H, W) into filters (halves * O, N * strips / halves, h, W).

    Usually, rows of b channels are gathered in one pass, with several threads. If rows are short,
    two passes take less time. The first pass gathers whole parts (N, O / b, strips, h * W * b). In
    the second pass, the runtime merges b parts row by row, with its operator for blocks of
    channels. If a half has too few samples to fill its blocks, the last sample is repeated. For the
    repeated samples the image has zeros, so the sums do not change.
    """
    moved = gradient.moved
    b, batch = layout.block, dims_of(moved)[0]
    _, outputs, high, columns = sizes_of(moved)
    blocks, rows, merged = outputs // b, high // cut.strips, b < LONG_ROW
    pixels, length = (1, rows * columns * b) if merged else (rows * columns, b)
    known = batch and batch * blocks * cut.strips * pixels
    parts = layout.reshaped(layout.image(moved), -1, length, dims=(known, length))
    samples = filled(batch, cut.unit)
    channels = samples and samples * cut.strips
    size = (channels and channels * blocks * pixels, length)
    chosen = order(layout, gradient, cut, pixels)
    gathered = layout.add("Gather", [parts, chosen], {"axis": 0}, shape=size)
    if merged:
        groups, sizes = channels and channels * blocks // b, (rows, columns)
        gathered = layout.reshaped(gathered, -1, b * b, *sizes, dims=(groups, b * b, *sizes))
        merge = {"channels": b * b, "channels_last": 1}
        shape = (groups, *sizes, b * b)
        gathered = layout.add("ReorderOutput", [gathered], merge, shape=shape, domain=DOMAIN)
    dims = (cut.halves * blocks * b, channels and channels // cut.halves, rows, columns)
    return layout.reshaped(gathered, dims[0], -1, rows, columns, dims=dims)


def order(layout: BlockedValues, gradient: Gradient, cut: Cut, pixels: int) -> Value:
    """Return the indices of the rows of `gradient.moved`, in the order that filters need.

    Rows are numbered in the blocked tensor (N, O / b, strips, pixels, ...). Each half becomes
    filters (O / b, N * strips / b, pixels, b, ...).
    """
    moved, (halves, strips, unit) = gradient.moved, cut
    b, batch, blocks = layout.block, dims_of(moved)[0], sizes_of(moved)[1] // layout.block
    key = (batch_of(layout, gradient.image, moved), blocks, pixels, cut)
    if key in layout.from_lengths:
        return layout.from_lengths[key]

    def whole(operator: str, inputs: list[Value], *shape: int | None) -> Value:
        return layout.add(operator, inputs, shape=shape, dtype=WHOLE)

    def number(value: int) -> Value:
        return layout.constant(np.array(value))

    samples = filled(batch, unit)
    channels = samples and samples * strips
    count = whole("Squeeze", [count_of(layout, layout.image(moved), 0)])
    missing = whole("Mod", [whole("Neg", [count]), number(unit)])
    positions = whole("Range", [number(0), whole("Add", [count, missing]), number(1)], samples)
    numbers = whole("Min", [positions, whole("Sub", [count, number(1)])], samples)
    firsts = whole("Mul", [numbers, number(blocks * strips * pixels)], samples)
    if strips > 1:
        firsts = layout.reshaped(firsts, -1, 1, dims=(samples, 1))
        offsets = layout.constant(np.arange(strips) * pixels)
        firsts = whole("Add", [firsts, offsets], samples, strips)
    groups = channels and channels // (halves * b)
    firsts = layout.reshaped(firsts, halves, 1, -1, 1, b, dims=(halves, 1, groups, 1, b))
    rows = np.arange(blocks)[:, None] * strips * pixels + np.arange(pixels)
    offsets = layout.constant(rows.reshape(1, blocks, 1, pixels, 1))
    ordered = whole("Add", [firsts, offsets], halves, blocks, groups, pixels, b)
    dims = (channels and channels * blocks * pixels,)
    layout.from_lengths[key] = layout.reshaped(ordered, -1, dims=dims)
    return layout.from_lengths[key]
