"""All test rows by operator group of `operator_support`, one row for each case."""

import functools
import os

import torch

from function_rows import FUNCTIONS
from layer_cases import Case, Row
from layer_rows import LAYERS
from parameters import ALL, half_of, quarter_quick
from product_rows import PRODUCTS

ROWS: dict[str, dict[str, Row]] = {**PRODUCTS, **LAYERS, **FUNCTIONS}
COMBINED = {
    "convolution": (
        *("conv2d padding", "conv2d no bias", "conv2d stride", "conv2d dilation", "conv2d 1xk"),
        *("conv2d stride above kernel", "conv2d 1x1 stride", "conv2d depthwise", "conv1d"),
        *("conv2d uneven padding", "conv2d uneven stride", "conv2d uneven dilation"),
        *("conv2d groups", "conv2d kx1"),
    ),
    "transposed convolution": ("no bias", "stride", "dilation", "groups", "depthwise", "1d"),
    "attention": (
        *("plain", "causal", "scale", "without heads", "multi-head, no bias"),
        *("multi-head", "multi-head, causal"),
        *("encoder layer, norm first", "encoder layer, predicting"),
    ),
    "normalisation": (
        *("layer over two axes", "layer, no bias", "group, not affine", "group over time"),
        *("instance", "instance over time", "root mean square, not affine"),
    ),
    "max pooling": ("stride 1", "dilation", "ceil mode", "uneven", "adaptive"),
    "average pooling": ("overlapping", "ceil mode", "rest left over", "uneven", "3d", "adaptive"),
    "shape": (
        *("stack", "chunk", "view", "unflatten", "move an axis", "slice from the end", "narrow"),
        *("tile", "diagonal", "diagonal below", "tensor_split", "flatten"),
    ),
    "interpolation": (
        *("nearest, fraction", "bilinear, size", "bilinear, aligned corners", "linear"),
        "bilinear, size, aligned corners",
    ),
    "padding": ("zeros", "convolution that reflects"),
    "softmax": ("softmax over channels", "log-softmax over the last axis", "softmin"),
    "batch norm": ("batch norm 1d, predicting",),
    "grid sampling": ("aligned corners", "affine"),
}
"""Rows whose operators and options are also in other rows of their group."""

GROUPS = quarter_quick(ROWS)
"""All groups; a quarter runs in each run, the same in all runtimes, which share recordings."""


@functools.cache
def recorded(group: str, seed: int, every: bool = ALL in os.environ) -> dict[str, Case]:
    """The cases of `group` with weights drawn by `seed`, recorded once for all runtimes.

    Unless they are wanted `every` one, they are half of those whose operators are not in other
    rows, too.
    """
    rows, combined = ROWS[group], COMBINED.get(group, ())
    names = list(rows) if every else half_of(name for name in rows if name not in combined)
    torch.manual_seed(seed)
    return {name: Case.of(rows[name], record=True) for name in names}
