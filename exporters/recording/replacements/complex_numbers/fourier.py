"""Fourier transforms as products with constant matrices, in place of torch's functions."""

import math
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from exporters.recording.replacements.complex_numbers.complex_pairs import Pair, paired, product
from exporters.recurrence.replacements import Replacement

LARGEST = 4096
"""Most points of a transform: its two matrices have up to 128 MB."""


def waves(n: int, count: int, like: Tensor, scale: Any = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin of 2 pi j k / n for j < n and k < `count`, times `scale`: two (n, count)."""
    # Whole periods are left out before the angle is rounded.
    angles = 2 * np.pi / n * (np.outer(np.arange(n), np.arange(count)) % n)
    parts = (scale * part(angles) for part in (np.cos, np.sin))
    cos, sin = (torch.tensor(part, dtype=like.dtype, device=like.device) for part in parts)
    return cos, sin


def scale_of(n: int, norm: str | None, inverse: bool) -> float:
    """The factor of a transform of `n` points."""
    if norm == "ortho":
        return 1 / math.sqrt(n)
    return 1 / n if inverse == (norm != "forward") else 1.0


def resized(x: Tensor, n: int | None) -> Tensor:
    """`x` with `n` elements along the last axis, cut or padded with zeros."""
    size = x.shape[-1]
    if n is None or n == size:
        return x
    return x[..., :n] if n < size else functional.pad(x, (0, n - size))


def can_transform(x: Any, n: int | None, dim: int) -> bool:
    """Whether the number of points is fixed and small enough."""
    size = x.shape[dim] if n is None else n
    return isinstance(size, int) and 0 < size <= LARGEST


def along(x: Any, dim: int, transform: Any) -> Any:
    """`transform` along the axis `dim` of a tensor or a pair."""
    last = transform(x.transpose(dim, -1))
    return last.transpose(dim, -1)


def rfft(func: Any, input: Tensor, n: int | None = None, dim: int = -1, norm: Any = None) -> Any:
    """`torch.fft.rfft`: n // 2 + 1 frequencies of a real series."""
    if not can_transform(input, n, dim):
        return func(input, n, dim, norm)

    def transform(input: Tensor) -> Pair:
        input = resized(input, n)
        size = input.shape[-1]
        cos, sin = waves(size, size // 2 + 1, input, scale_of(size, norm, inverse=False))
        return Pair(input @ cos, -(input @ sin))

    return along(input, dim, transform)


def fft(
    func: Any,
    input: Any,
    n: int | None = None,
    dim: int = -1,
    norm: Any = None,
    inverse: bool = False,
) -> Any:
    """`torch.fft.fft`, or `ifft` with `inverse`."""
    if not can_transform(input, n, dim):
        return func(input, n, dim, norm)

    def transform(z: Any) -> Any:
        z = Pair(resized(z.real, n), resized(z.imag, n)) if isinstance(z, Pair) else resized(z, n)
        size = z.shape[-1]
        cos, sin = waves(size, size, z.real, scale_of(size, norm, inverse))
        return product(operator.matmul, z, Pair(cos, sin if inverse else -sin))

    return along(input, dim, transform)


def irfft(func: Any, input: Any, n: int | None = None, dim: int = -1, norm: Any = None) -> Any:
    """`torch.fft.irfft`: a real series of `n` points from its frequencies."""
    if not can_transform(input, n, dim):
        return func(input, n, dim, norm)

    def transform(z: Pair) -> Tensor:
        size = 2 * (z.shape[-1] - 1) if n is None else n
        count = size // 2 + 1
        # Each frequency except the first stands for two. The last one does this only if the number
        # of points is odd.
        twice = np.full(count, 2.0)
        twice[0] = 1.0
        if size % 2 == 0:
            twice[-1] = 1.0
        cos, sin = waves(size, count, z.real, scale_of(size, norm, inverse=True) * twice)
        return resized(z.real, count) @ cos.T - resized(z.imag, count) @ sin.T

    return along(paired(input), dim, transform)


def over_axes(
    last: Replacement | None, inner: Replacement, default: Sequence[int] | None
) -> Replacement:
    """A transform over several axes: `inner` for each axis, but `last` (if given) for the last."""

    def transform(
        func: Any, input: Any, s: Any = None, dim: Any = default, norm: Any = None
    ) -> Any:
        count = input.ndim if s is None else len(s)
        axes = tuple(range(-count, 0)) if dim is None else tuple(dim)
        sizes = [None] * len(axes) if s is None else [None if n == -1 else n for n in s]
        steps = [(inner, n, axis) for n, axis in zip(sizes, axes, strict=True)]
        if not all(can_transform(input, n, axis) for _, n, axis in steps):
            return func(input, s, dim, norm)
        if last is not None:
            steps[-1] = (last, sizes[-1], axes[-1])
        # A transform of real numbers comes first; one back to real numbers comes last.
        for transform, n, axis in reversed(steps) if last is rfft else steps:
            input = transform(func, input, n, axis, norm)
        return input

    return transform


def stft(
    func: Any,
    x: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    pad_mode: str = "reflect",
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    **more: Any,
) -> Any:
    """`torch.stft` as a convolution: each kernel is the window times a wave."""
    if any(value is not None for value in more.values()) or n_fft > LARGEST:
        return func(
            *(x, n_fft, hop_length, win_length, window, center, pad_mode, normalized),
            *(onesided, return_complex),
            **more,
        )
    batch = x if x.dim() == 2 else x[None]
    if center:
        batch = functional.pad(batch[:, None], (n_fft // 2, n_fft // 2), mode=pad_mode)[:, 0]
    count = n_fft if onesided is False else n_fft // 2 + 1
    cos, sin = waves(n_fft, count, batch, 1 / math.sqrt(n_fft) if normalized else 1.0)
    kernels = torch.cat([cos, -sin], 1)
    kernels = kernels * whole_window(n_fft, win_length, window, kernels)[:, None]
    hop = n_fft // 4 if hop_length is None else hop_length
    both = functional.conv1d(batch[:, None], kernels.T[:, None], stride=hop)
    both = both if x.dim() == 2 else both[0]
    real, imag = both.narrow(-2, 0, count), both.narrow(-2, count, count)
    return Pair(real, imag) if return_complex else torch.stack([real, imag], -1)


def whole_window(n_fft: int, length: int | None, window: Tensor | None, like: Tensor) -> Tensor:
    """The window of a short-time transform, with zeros on both sides up to `n_fft` points."""
    if window is None:
        window = torch.ones(n_fft if length is None else length).to(like)
    left = (n_fft - window.shape[0]) // 2
    return functional.pad(window, (left, n_fft - window.shape[0] - left))


def istft(
    func: Any,
    input: Pair,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Any:
    """`torch.istft` as a transposed convolution, divided by the sum of the squared windows."""
    frames = input.shape[-1]
    if onesided is False or return_complex or n_fft > LARGEST or not isinstance(frames, int):
        return func(
            *(input, n_fft, hop_length, win_length, window, center, normalized),
            *(onesided, length, return_complex),
        )
    hop = n_fft // 4 if hop_length is None else hop_length
    both = torch.cat([input.real, input.imag], -2)
    both = both if both.dim() == 3 else both.unsqueeze(0)
    own = whole_window(n_fft, win_length, window, both)
    places = torch.arange(both.shape[1])
    unit = (places[:, None] == places).to(both)  # `torch.eye` has integers that TFLite lacks
    series = irfft(func, Pair(*unit.chunk(2, 1)), n_fft)
    if normalized:
        series = series * math.sqrt(n_fft)
    added = functional.conv_transpose1d(both, (series * own).unsqueeze(1), stride=hop)[:, 0]
    ones = torch.ones(1, 1, frames).to(both)
    sums = functional.conv_transpose1d(ones, own.square().view(1, 1, -1), stride=hop)[0, 0]
    first = n_fft // 2 if center else 0
    last = added.shape[1] - first if length is None else first + length
    result = added[:, first:last] / sums[first:last].clamp(min=1e-11)
    if length is not None:
        result = resized(result, length)
    return result if input.dim() == 3 else result[0]


def as_complex(_: Any, input: Tensor) -> Pair:
    """`torch.view_as_complex`."""
    return Pair(input[..., 0], input[..., 1])


def real_and_imaginary(_: Any, real: Tensor, imag: Tensor) -> Pair:
    """`torch.complex`."""
    return Pair(real, imag)


def polar(_: Any, abs: Tensor, angle: Tensor) -> Pair:
    """`torch.polar`."""
    return Pair(abs * angle.cos(), abs * angle.sin())


ifft = partial(fft, inverse=True)
FOURIER: dict[Any, Replacement] = {
    torch.fft.rfft: rfft,
    torch.fft.irfft: irfft,
    torch.fft.fft: fft,
    torch.fft.ifft: ifft,
    torch.fft.rfft2: over_axes(rfft, fft, (-2, -1)),
    torch.fft.rfftn: over_axes(rfft, fft, None),
    torch.fft.irfft2: over_axes(irfft, ifft, (-2, -1)),
    torch.fft.irfftn: over_axes(irfft, ifft, None),
    torch.fft.fft2: over_axes(None, fft, (-2, -1)),
    torch.fft.fftn: over_axes(None, fft, None),
    torch.fft.ifft2: over_axes(None, ifft, (-2, -1)),
    torch.fft.ifftn: over_axes(None, ifft, None),
    torch.stft: stft,
    Tensor.stft: stft,
    torch.istft: istft,
    Tensor.istft: istft,
    torch.complex: real_and_imaginary,
    torch.view_as_complex: as_complex,
    torch.polar: polar,
}
"""Maps a function with complex results to the function that is recorded in its place."""
