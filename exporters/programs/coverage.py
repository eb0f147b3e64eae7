"""What a model may be made of to be exported with its training step: the table, in one place.

`edgetailor export --list-operators` prints it and docs/operators.md contains it. A row here has
test rows under the same name, which hold its gradients to 1e-5 of float64 autograd.
"""

from dataclasses import dataclass

from exporters.programs.source_lines import stem


@dataclass(frozen=True)
class Group:
    """Operators that export in both formats, gradients included."""

    name: str
    covers: str


@dataclass(frozen=True)
class Refusal:
    """Operators that do not; `words` are what their ATen names begin with."""

    name: str
    words: tuple[str, ...]
    reason: str
    nearest: str


GROUPS = (
    Group("convolution", "1-D and 2-D: stride, padding, dilation, groups, depthwise, bias"),
    Group("transposed convolution", "the same, and output padding"),
    Group("linear", "with and without bias, over any axes in front"),
    Group("matrix product", "matmul, bmm, addmm, baddbmm, einsum, bilinear"),
    Group(
        "attention",
        "scaled dot product (no mask, causal, boolean, additive, scale, grouped queries), "
        "nn.MultiheadAttention, nn.TransformerEncoderLayer",
    ),
    Group(
        "recurrence",
        "nn.LSTM, nn.GRU, nn.RNN: any number of layers, one direction or both, as loops over time",
    ),
    Group("batch norm", "1-D and 2-D, by the batch or by running statistics"),
    Group(
        "normalisation",
        "layer, group, instance, root mean square, local response, unit length, weight norm",
    ),
    Group("max pooling", "1-D and 2-D, any window (overlapping, padded, dilated), adaptive"),
    Group("average pooling", "1-D to 3-D, any window and divisor; adaptive (1-D and 2-D), power"),
    Group("embedding", "nn.Embedding, padding index, one-hot, parameters indexed by samples"),
    Group(
        "activation",
        "relu, relu6, leaky relu, prelu, elu, selu, celu, gelu (both), silu, mish, sigmoid, "
        "hardsigmoid, hardswish, hardtanh, shrinks, threshold, tanh, softplus, softsign, "
        "logsigmoid, glu",
    ),
    Group("softmax", "softmax, log-softmax, softmin, logsumexp, over any axis"),
    Group(
        "shape",
        "concat, stack, split, chunk, reshape, permute, slice, select, expand, repeat, flip, "
        "roll, triangles, diagonal, unfold, fold, pixel and channel shuffle",
    ),
    Group("padding", "constant, reflect, replicate, circular"),
    Group("indexing", "constants, gather, where, masked fill, top-k, sort, scatter-add"),
    Group("reduction", "mean, sum, max, min, var, std, norm, cumsum"),
    Group("arithmetic", "powers, exponentials, logarithms, roots, trigonometry, clamp, rounding"),
    Group(
        "dropout",
        "of elements, channels and attention's weights, seeded by an input of the step",
    ),
    Group("residual", "skips by addition and concatenation, gates"),
    Group(
        "interpolation",
        "nearest, linear, bilinear (both alignments), bicubic, area; by scale or size",
    ),
)

REFUSALS = (
    Refusal("3-D convolution", ("convolution",), "no gradient", "2-D ones"),
    Refusal("3-D max pooling", ("max_pool3d",), "no gradient", "3-D average pooling, or strides"),
    Refusal(
        "adaptive 3-D pooling",
        ("adaptive_avg_pool3d", "adaptive_max_pool3d"),
        "no gradient",
        "the mean over the axes, or nn.AvgPool3d",
    ),
    Refusal(
        "embedding bag",
        ("embedding_bag",),
        "bags of any length have no forward form",
        "nn.Embedding and a sum or mean over its axis 1",
    ),
    Refusal(
        "median", ("median", "kthvalue", "mode"), "in neither format", "torch.topk or torch.sort"
    ),
    Refusal(
        "product over an axis",
        ("prod", "cumprod"),
        "in neither format",
        "exp of the sum of logarithms",
    ),
    Refusal(
        "antialiased interpolation",
        ("upsample_bilinear2d_aa", "upsample_bicubic2d_aa"),
        "no gradient",
        "antialias=False, or average pooling",
    ),
    Refusal("distances of all pairs", ("cdist",), "no gradient", "sums of squared differences"),
    Refusal(
        "inverses and decompositions",
        ("linalg", "inverse", "cholesky", "svd"),
        "in neither format",
        "products, as of a fixed number of iterations",
    ),
    Refusal("sparse gradients", ("sparse",), "in neither format", "sparse=False"),
    Refusal(
        "writes into a part of a tensor",
        ("as_strided",),
        "no gradient",
        "torch.where, torch.cat or masked_fill, which make a new tensor",
    ),
    Refusal("grid sampling", ("grid_sampler",), "no gradient", "nn.Upsample"),
)


def refusal(operator: str) -> Refusal | None:
    """The row about an ATen `operator` like aten::median, if there is one."""
    name = stem(operator)
    return next((row for row in REFUSALS if name.startswith(row.words)), None)


def advice(operator: str) -> str:
    """What to do instead of `operator`."""
    row = refusal(operator)
    if row is None:
        return "use another one (edgetailor export --list-operators)."
    return f"{row.name} ({row.reason}) is not covered; nearest: {row.nearest}."


def document() -> str:
    """The whole of docs/operators.md."""
    head = ("operators", "what of them", "ONNX", "TFLite")
    yes = [(group.name, group.covers, "yes", "yes") for group in GROUPS]
    no = [(r.name, f"use {r.nearest}", *[f"no: {r.reason}"] * 2) for r in REFUSALS]
    return "\n".join([*INTRODUCTION, *markdown([head, *yes, *no])])


INTRODUCTION = (
    "# Operators",
    "",
    "What a model may be made of to be exported with its training step. Gradients of parameters",
    "and samples are within 1e-5 (relative norm) of PyTorch's in float64, for any batch.",
    "",
)


def markdown(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines of a Markdown table; the first row is its head."""
    head, *body = rows
    return [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *body)]
