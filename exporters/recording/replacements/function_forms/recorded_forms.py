"""Functions of torch that are recorded as other operators, which have gradients in both formats.

`FORMS` lists all of them. Functions of one subject have a file of their own; the others are here.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.nn import functional

from exporters.programs.source_lines import called_place
from exporters.recording.replacements.function_forms.ctc_form import ctc_loss
from exporters.recording.replacements.function_forms.cumulative import CUMULATIVE
from exporters.recording.replacements.function_forms.index_forms import INDEXING
from exporters.recording.replacements.function_forms.multilabel_margin import multilabel_margin_loss
from exporters.recording.replacements.function_forms.recurrent_cells import RECURRENT_CELLS
from exporters.recording.replacements.function_forms.small_matrices import SMALL_MATRICES
from exporters.recording.replacements.function_forms.sparse_matrices import SPARSE_MATRICES
from exporters.recording.replacements.function_forms.statistics import STATISTICS
from exporters.recording.replacements.function_forms.tensor_methods import TENSOR_METHODS
from exporters.recording.replacements.python_code.python_functions import join
from exporters.recurrence.replacements import Replacement
from profiles.errors import ModelError

Computes = Callable[..., Tensor]


def renorm(_: Any, input: Tensor, p: float, dim: int, maxnorm: float) -> Tensor:
    """`torch.renorm`: parts along `dim` whose norm is above `maxnorm` are scaled down to it."""
    others = [axis for axis in range(input.dim()) if axis != dim % input.dim()]
    norms = torch.linalg.vector_norm(input, p, others, keepdim=True)
    return input * torch.where(norms > maxnorm, maxnorm / (norms + 1e-7), 1.0)


def cdist(_: Any, a: Tensor, b: Tensor, p: float = 2.0, *__: Any, **___: Any) -> Tensor:
    """`torch.cdist`: the norms of all differences."""
    norms: Tensor = torch.linalg.vector_norm(a.unsqueeze(-2) - b.unsqueeze(-3), p, -1)
    return norms


def embedding_bag(func: Computes, ids: Tensor, weight: Tensor, *given: Any, **more: Any) -> Tensor:
    """`embedding_bag` of bags of one size: the sum, the mean or the maximum of embeddings.

    Raises ModelError for options that change a gradient or the weight itself.
    """
    mode, weights = more.get("mode", "mean"), more.get("per_sample_weights")
    padding = more.get("padding_idx")
    for option, without in (("max_norm", None), ("sparse", False), ("scale_grad_by_freq", False)):
        if more.get(option) not in (None, without):
            raise ModelError(
                "The embedding bag{place} has {option}={value}, which cannot be exported. Set "
                "{option}={instead}.",
                code="model.embedding-bag",
                option=option,
                value=str(more[option]),
                instead=str(without),
                place=called_place(),
            )
    if ids.dim() != 2 or given:
        return func(ids, weight, *given, **more)
    rows = functional.embedding(ids, weight)
    rows = rows if weights is None else rows * weights.unsqueeze(-1)
    if padding is None:
        return {"sum": rows.sum, "mean": rows.mean, "max": rows.amax}[mode](1)
    kept: Tensor = (ids != padding % weight.shape[0]).to(rows.dtype).unsqueeze(-1)
    if mode == "max":
        # Padding is replaced by the bag's first element that is not padding; a bag of only padding
        # is zero.
        first = rows.gather(1, kept.argmax(1, keepdim=True).expand(-1, 1, rows.shape[-1]))
        largest: Tensor = torch.where(kept > 0, rows, first).amax(1) * kept.amax(1)
        return largest
    total: Tensor = (rows * kept).sum(1)
    return total if mode == "sum" else total / kept.sum(1).clamp(min=1)


def one_hot(func: Computes, input: Tensor, num_classes: int = -1) -> Tensor:
    """`one_hot`, computed by a comparison. The function of torch checks values, but no graph can.

    Raises ModelError without `num_classes`: torch would read the number from the values.
    """
    if num_classes != -1 and input.dtype == torch.int64:
        return (input.unsqueeze(-1) == torch.arange(num_classes)).to(torch.int64)
    if num_classes != -1:
        return func(input, num_classes)
    raise ModelError(
        "one_hot without num_classes{place} reads the largest class of the batch. Pass the number "
        "of classes: one_hot(x, num_classes).",
        code="model.data-dependent-code",
        place=called_place(),
    )


def gaussian_nll_loss(
    _: Any,
    input: Tensor,
    target: Tensor,
    var: Any,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """`gaussian_nll_loss` without torch's check that the variances are positive."""
    if not isinstance(var, Tensor):
        var = torch.full_like(input, var)
    elif var.dim() == input.dim() - 1:
        var = var.unsqueeze(-1)
    var = var + (var.clamp(min=eps) - var).detach()  # the gradient goes to `var`
    loss: Tensor = 0.5 * (var.log() + (input - target).square() / var)
    loss = loss + 0.5 * math.log(2 * math.pi) if full else loss
    return loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.mean()


def fake_quantize(
    func: Computes, input: Tensor, scale: Any, zero_point: Any, quant_min: int, quant_max: int
) -> Tensor:
    """`torch.fake_quantize_per_tensor_affine` with a fixed scale.

    Clipped values get no gradient.
    """
    if isinstance(scale, Tensor) or isinstance(zero_point, Tensor):
        return func(input, scale, zero_point, quant_min, quant_max)
    steps = (input.detach() / scale).round() + zero_point
    kept = torch.where((steps >= quant_min) & (steps <= quant_max), input, 0.0)
    change: Tensor = (steps.clamp(quant_min, quant_max) - zero_point) * scale - kept
    return kept + change.detach()


def logit(_: Any, input: Tensor, eps: float | None = None) -> Tensor:
    """`torch.logit`: ln(x / (1 - x))."""
    input = input if eps is None else input.clamp(eps, 1 - eps)
    return (input / (1 - input)).log()


def convolution(
    func: Computes,
    input: Tensor,
    weight: Tensor,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    *given: Any,
    **more: Any,
) -> Tensor:
    """A convolution with `padding="valid"`, which torch would record as one zero for all axes.

    If its number of groups depends on the batch, it becomes a product of patches and kernels.
    """
    padding = 0 if padding == "valid" else padding
    names = ("dilation", "groups")
    options: dict[str, Any] = {"dilation": 1, "groups": 1, **more}
    options.update(zip(names, given, strict=False))
    groups, dilation = options["groups"], options["dilation"]
    if isinstance(groups, SymInt) and weight.dim() == 4 and not isinstance(padding, str):
        return grouped_by_sample(input, weight, bias, stride, padding, dilation, groups)
    return func(input, weight, bias, stride, padding, *given, **more)


def grouped_by_sample(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: SymInt,
) -> Tensor:
    """A convolution (n, groups * c, h, w) with kernels (groups * k, c, kh, kw) of each group."""
    steps, edges, gaps = ((s, s) if isinstance(s, int) else s for s in (stride, padding, dilation))
    rows, (height, width), kernel = input.shape[0], input.shape[2:], weight.shape[2:]
    channels, kernels = weight.shape[1], weight.reshape(groups, -1, math.prod(weight.shape[1:]))
    patches = functional.unfold(
        input.reshape(rows * groups, channels, height, width), kernel, gaps, edges, steps
    )
    sizes = [
        (size + 2 * edge - gap * (length - 1) - 1) // step + 1
        for size, edge, gap, length, step in zip(
            (height, width), edges, gaps, kernel, steps, strict=True
        )
    ]
    products = torch.matmul(kernels, patches.reshape(rows, groups, *patches.shape[1:]))
    output: Tensor = products.reshape(rows, groups * kernels.shape[1], *sizes)
    return output if bias is None else output + bias.reshape(-1, 1, 1)


def right_shift(func: Computes, input: Tensor, other: Any) -> Tensor:
    """`input >> other`, as a quotient that is rounded down."""
    if type(other) is not int or other < 0:
        return func(input, other)
    return torch.div(input, 2**other, rounding_mode="floor")


def left_shift(func: Computes, input: Tensor, other: Any) -> Tensor:
    """`input << other`, as a product."""
    return input * 2**other if type(other) is int and other >= 0 else func(input, other)


FORMS: dict[Any, Replacement] = {
    **INDEXING,
    **CUMULATIVE,
    **RECURRENT_CELLS,
    **TENSOR_METHODS,
    **STATISTICS,
    **SMALL_MATRICES,
    **SPARSE_MATRICES,
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate, torch.stack), join),
    torch.cdist: cdist,
    **dict.fromkeys(
        (Tensor.__rshift__, torch.bitwise_right_shift, Tensor.bitwise_right_shift), right_shift
    ),
    **dict.fromkeys(
        (Tensor.__lshift__, torch.bitwise_left_shift, Tensor.bitwise_left_shift), left_shift
    ),
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), convolution),
    torch.renorm: renorm,
    Tensor.renorm: renorm,
    functional.embedding_bag: embedding_bag,
    torch.logit: logit,
    Tensor.logit: logit,
    torch.special.logit: logit,
    functional.one_hot: one_hot,
    functional.gaussian_nll_loss: gaussian_nll_loss,
    functional.ctc_loss: ctc_loss,
    functional.multilabel_margin_loss: multilabel_margin_loss,
    torch.fake_quantize_per_tensor_affine: fake_quantize,
}
"""Maps a function of torch to the function that is recorded in its place."""
