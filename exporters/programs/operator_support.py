"""The table of operators that can be exported with a training step, and of other operators.

`edgetailor export --list-operators` prints this table, and docs/reference/operators.md contains it.
Each row has test rows with the same name. The tests compare the gradients of its operators with
float64 autograd to 1e-5.
"""

from dataclasses import dataclass

import torch
from torch._ops import OpOverload

from exporters.decompositions import table
from exporters.programs.source_lines import stem


@dataclass(frozen=True)
class SupportedGroup:
    """Operators that can be exported in both formats, including their gradients."""

    name: str
    covers: str


@dataclass(frozen=True)
class UnsupportedGroup:
    """Operators that cannot be exported.

    Attributes:
        name: Name of the group.
        prefixes: Prefixes of the ATen names of its operators.
        reason: Why the operators cannot be exported.
        alternative: The replacement, as a text that follows "use".
    """

    name: str
    prefixes: tuple[str, ...]
    reason: str
    alternative: str


SUPPORTED = (
    SupportedGroup(
        "convolution", "1-D and 2-D: stride, padding, dilation, groups, depthwise, bias"
    ),
    SupportedGroup("transposed convolution", "1-D and 2-D: as convolution, and output padding"),
    SupportedGroup("linear", "with or without bias, over any leading axes"),
    SupportedGroup("matrix product", "matmul, bmm, addmm, baddbmm, einsum, bilinear"),
    SupportedGroup(
        "attention",
        "scaled dot product (no, causal, boolean or additive mask; scale; grouped queries), "
        "nn.MultiheadAttention, nn.TransformerEncoderLayer",
    ),
    SupportedGroup(
        "recurrence",
        "nn.LSTM, nn.GRU, nn.RNN: any number of layers, one or both directions, as loops over "
        "time; packed sequences, as masks; their cells in a Python loop",
    ),
    SupportedGroup("batch norm", "1-D and 2-D, with statistics of the batch or running statistics"),
    SupportedGroup(
        "normalisation",
        "layer, group, instance, root mean square, local response, unit length, weight norm",
    ),
    SupportedGroup(
        "max pooling", "1-D and 2-D, any window (overlapping, padded, dilated), adaptive"
    ),
    SupportedGroup(
        "average pooling", "1-D to 3-D, any window and divisor; adaptive (1-D and 2-D), power"
    ),
    SupportedGroup(
        "embedding", "nn.Embedding, padding index, one-hot, parameters indexed by samples"
    ),
    SupportedGroup(
        "activation",
        "relu, relu6, leaky relu, prelu, elu, selu, celu, gelu (both), silu, mish, sigmoid, "
        "hardsigmoid, hardswish, hardtanh, shrinks, threshold, tanh, softplus, softsign, "
        "logsigmoid, glu",
    ),
    SupportedGroup("softmax", "softmax, log-softmax, softmin, logsumexp over any axis"),
    SupportedGroup(
        "shape",
        "concat, stack, split, chunk, reshape, permute, slice, select, expand, repeat, flip, "
        "roll, triangles, diagonal, unfold, fold, pixel and channel shuffle",
    ),
    SupportedGroup("padding", "constant, reflect, replicate, circular"),
    SupportedGroup(
        "indexing", "constants, gather, where, masked fill, top-k, sort, sums and means by scatter"
    ),
    SupportedGroup(
        "reduction",
        "mean, sum, product, max, min, var, std, norm, median, quantile, cumsum, cumprod, "
        "distances of all pairs",
    ),
    SupportedGroup(
        "arithmetic", "powers, exponentials, logarithms, roots, trigonometry, clamp, rounding"
    ),
    SupportedGroup(
        "Fourier transform",
        "torch.fft (fft, rfft and their inverses, over any axes) and torch.stft of up to 4096 "
        "points, as products with constants; arithmetic, parts, sizes and angles of the result",
    ),
    SupportedGroup(
        "dropout",
        "of elements, channels, attention weights, whole branches (stochastic depth), and between "
        "recurrent layers; an input of the step is the seed",
    ),
    SupportedGroup("residual", "skip connections by addition or concatenation, gates"),
    SupportedGroup(
        "interpolation",
        "nearest, linear, bilinear (both alignments), bicubic, area; by scale or size",
    ),
    SupportedGroup(
        "grid sampling",
        "2-D: bilinear and nearest, padded by zeros or the border, both alignments; affine grids",
    ),
    SupportedGroup(
        "writes in place",
        "activations, arithmetic and dropout in place; writes into slices and views",
    ),
)

UNSUPPORTED = (
    UnsupportedGroup(
        "3-D convolution",
        ("convolution", "conv3d", "conv_transpose3d"),
        "no gradient",
        "2-D convolution",
    ),
    UnsupportedGroup(
        "3-D max pooling",
        ("max_pool3d",),
        "no gradient",
        "3-D average pooling, or slices with a step",
    ),
    UnsupportedGroup(
        "adaptive 3-D pooling",
        ("adaptive_avg_pool3d", "adaptive_max_pool3d"),
        "no gradient",
        "the mean over the axes, or nn.AvgPool3d",
    ),
    UnsupportedGroup(
        "embedding bag with offsets",
        ("embedding_bag",),
        "bags of any length cannot be computed by forward operators",
        "ids of the shape (batch, n), or nn.Embedding and a sum or mean over its axis 1",
    ),
    UnsupportedGroup(
        "median of all numbers",
        ("median", "mode"),
        "it mixes the samples of a batch",
        "torch.median or torch.quantile along an axis",
    ),
    UnsupportedGroup(
        "product of all numbers",
        ("prod", "cumprod"),
        "it mixes the samples of a batch",
        "torch.prod along one axis after another",
    ),
    UnsupportedGroup(
        "antialiased interpolation",
        ("upsample_bilinear2d_aa", "upsample_bicubic2d_aa"),
        "no gradient",
        "antialias=False, or average pooling",
    ),
    UnsupportedGroup(
        "decompositions, and inverses of large matrices",
        ("linalg", "matrix_exp", "inverse", "cholesky", "svd"),
        "neither ONNX nor TFLite has them",
        "torch.linalg.inv, solve, slogdet or cholesky of at most 32 rows, or matrix products, for "
        "example a fixed number of iterations",
    ),
    UnsupportedGroup(
        "sparse gradients", ("sparse",), "neither ONNX nor TFLite has them", "sparse=False"
    ),
    UnsupportedGroup(
        "writes through strides",
        ("as_strided",),
        "no gradient",
        "slices and views, or torch.where",
    ),
    UnsupportedGroup(
        "bicubic, reflecting and 3-D grid sampling",
        ("grid_sampler", "affine_grid"),
        "no gradient",
        'mode="bilinear" and padding_mode="zeros"',
    ),
    UnsupportedGroup(
        "special functions",
        (
            *("erfinv", "ndtri", "polygamma", "igamma", "gammainc", "zeta", "i0", "i1", "airy"),
            *("j0", "j1", "y0", "y1", "modified_bessel", "scaled_modified_bessel", "spherical"),
            *("chebyshev", "shifted_chebyshev", "hermite", "laguerre", "legendre"),
            *("frexp", "nextafter", "gcd"),
        ),
        "neither ONNX nor TFLite has them",
        "a polynomial that approximates the function on the range you need",
    ),
    UnsupportedGroup(
        "histograms",
        ("histc", "histogram"),
        "TFLite has no histogram operator, and ONNX has none whose bounds depend on the samples",
        "torch.bincount(indices, minlength=bins) of the indices of bins",
    ),
    UnsupportedGroup(
        "distances of pairs without repetition",
        ("pdist",),
        "no gradient",
        "torch.cdist(x, x), which contains each pair twice",
    ),
    UnsupportedGroup(
        "masked scatter",
        ("masked_scatter",),
        "no gradient",
        "torch.where(mask, values, x) with values in the shape of x",
    ),
)


EXPORTED = ("linalg_vector_norm", "linalg_cross", "lift_fresh_copy", "lift_fresh")
"""Operators that are exported, although their names or a missing form suggest otherwise."""


def find_unsupported(operator: str) -> UnsupportedGroup | None:
    """The unsupported group of an ATen `operator` like aten::median, or None."""
    name = stem(operator)
    if name in EXPORTED:
        return None
    return next((row for row in UNSUPPORTED if name.startswith(row.prefixes)), None)


def may_lack_form(operator: str) -> bool:
    """Whether an export may fail for an ATen `operator` like aten::median.

    An export may fail for operators of an unsupported group. It may also fail for operators that
    are not PyTorch core operators and have no decomposition into core operators.
    """
    if find_unsupported(operator) is not None:
        return True
    namespace, _, name = operator.partition("::")
    if namespace != "aten" or stem(operator) in EXPORTED:
        return False
    packet, forms = getattr(torch.ops.aten, name), table()
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    return not any(
        torch.Tag.core in overload.tags or overload in forms or _decomposes(overload)
        for overload in overloads
    )


def _decomposes(overload: OpOverload) -> bool:
    """Whether PyTorch itself expresses `overload` by other operators."""
    try:
        return overload._can_decompose()
    except RuntimeError:  # of overloads without a kernel, such as copy_.Tensor
        return False


def suggest_alternative(operator: str) -> str:
    """The end of an error message about `operator`, which names a replacement.

    Args:
        operator: Name of an ATen operator, for example aten::median.

    Returns:
        A clause that ends in a full stop.
    """
    row = find_unsupported(operator)
    if row is None:
        return "use another operator (edgetailor export --list-operators lists them)."
    return f"no support for {row.name} ({row.reason}); use {row.alternative}."


def document() -> str:
    """The contents of docs/reference/operators.md, in Markdown."""
    head = ("operators", "supported variants, or alternative", "ONNX", "TFLite")
    yes = [(group.name, group.covers, "yes", "yes") for group in SUPPORTED]
    no = [(r.name, f"use {r.alternative}", *[f"no: {r.reason}"] * 2) for r in UNSUPPORTED]
    return "\n".join([*INTRODUCTION, *markdown([head, *yes, *no])])


INTRODUCTION = (
    "# Operators",
    "",
    "The table lists the operators that a model may use if it is exported with its training step.",
    "For any batch, the gradients of parameters and samples are within 1e-5 (relative norm) of",
    "PyTorch's in float64.",
    "",
)


def markdown(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines of a Markdown table; the first row is its header."""
    head, *body = rows
    return [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *body)]


OPERATORS_VERSION = 1


def as_json() -> dict[str, object]:
    """The document that `export --list-operators --json` prints.

    Every group in `operators` can be exported as ONNX and as TFLite, including gradients. Groups in
    `not_covered` cannot be exported in any format. The ATen names of their operators begin with one
    of `aten_prefixes`.
    """
    return {
        "version": OPERATORS_VERSION,
        "operators": [{"name": group.name, "covers": group.covers} for group in SUPPORTED],
        "not_covered": [
            {
                "name": group.name,
                "aten_prefixes": list(group.prefixes),
                "reason": group.reason,
                "instead": group.alternative,
            }
            for group in UNSUPPORTED
        ],
    }
