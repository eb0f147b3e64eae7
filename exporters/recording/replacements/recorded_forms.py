"""Functions of torch that are recorded as other operators, which have gradients in both formats."""

import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import SymInt, Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from exporters.programs import source_lines
from exporters.recording.replacements.index_forms import INDEXING
from exporters.recording.replacements.statistics import STATISTICS
from exporters.recurrence.replacements import Replacement
from profiles.errors import ModelError

LARGEST_PRODUCT = 256
"""A product over an axis with more factors than this is recorded as torch's own operator."""

State = tuple[Tensor, Tensor]
Computes = Callable[..., Tensor]


def prod(func: Computes, input: Tensor, *given: Any, **more: Any) -> Tensor:
    """`torch.prod` over one axis: multiply both halves, until one element is left.

    The gradient is correct even if elements are zero.
    """
    dim = more.get("dim", given[0] if given else None)
    keepdim = more.get("keepdim", given[1] if len(given) > 1 else False)
    if type(dim) is not int or input.dim() == 0 or more.get("dtype") is not None:
        return func(input, *given, **more)
    size = input.shape[dim]
    if (
        not isinstance(size, int)
        or not 0 < size <= LARGEST_PRODUCT
        or not input.is_floating_point()
    ):
        return func(input, *given, **more)
    while size > 1:
        half = size // 2
        product = input.narrow(dim, 0, half) * input.narrow(dim, half, half)
        rest = [input.narrow(dim, 2 * half, 1)] if size % 2 else []
        input = torch.cat([product, *rest], dim) if rest else product
        size = half + len(rest)
    return input if keepdim else input.squeeze(dim)


def cumprod(func: Computes, input: Tensor, dim: int, **more: Any) -> Tensor:
    """`torch.cumprod`. In each round, each product covers twice as many factors as before."""
    size = input.shape[dim] if input.dim() else 0
    if more or not isinstance(size, int) or not 0 < size <= LARGEST_PRODUCT:
        return func(input, dim, **more)
    input = input if input.is_floating_point() else input.to(torch.int64)
    shift = 1
    while shift < size:
        ones = torch.ones_like(input.narrow(dim, 0, shift))
        input = input * torch.cat([ones, input.narrow(dim, 0, size - shift)], dim)
        shift *= 2
    return input


def cummax(func: Any, input: Tensor, dim: int, better: Any = torch.ge) -> Any:
    """`torch.cummax`: in each round, the maximum of twice as many elements."""
    size = input.shape[dim] if input.dim() else 0
    if not isinstance(size, int) or not 0 < size <= LARGEST_PRODUCT:
        return func(input, dim)
    along = [1] * input.dim()
    along[dim] = size
    largest, indices = input.detach(), torch.arange(size).view(along).expand(input.shape)
    shift = 1
    while shift < size:
        # The first elements are compared with themselves. The last of equal ones counts.
        before, place = (
            torch.cat([v.narrow(dim, 0, shift), v.narrow(dim, 0, size - shift)], dim)
            for v in (largest, indices)
        )
        keep = better(largest, before)
        largest, indices = torch.where(keep, largest, before), torch.where(keep, indices, place)
        shift *= 2
    return torch.return_types.cummax((input.gather(dim, indices), indices))


def cummin(func: Any, input: Tensor, dim: int) -> Any:
    """`torch.cummin`."""
    found: tuple[Tensor, Tensor] = cummax(func, input, dim, torch.le)
    return torch.return_types.cummin(found)


def median(func: Any, input: Tensor, *given: Any, **more: Any) -> Any:
    """`torch.median` along an axis: the lower of the two middle values."""
    dim = more.get("dim", given[0] if given else None)
    if dim is None or not isinstance(input.shape[dim], int):
        return func(input, *given, **more)
    keepdim = more.get("keepdim", given[1] if len(given) > 1 else False)
    return torch.return_types.median(ranked(input, (input.shape[dim] - 1) // 2, dim, keepdim))


def kthvalue(func: Any, input: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """`torch.kthvalue`."""
    return torch.return_types.kthvalue(ranked(input, k - 1, dim, keepdim))


def ranked(x: Tensor, rank: int, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    """The value at position `rank` in ascending order, and its index."""
    values, indices = (part.narrow(dim, rank, 1) for part in x.sort(dim=dim, stable=True))
    return (values, indices) if keepdim else (values.squeeze(dim), indices.squeeze(dim))


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
        # Padding counts as the first element that is none; a bag of padding alone is zero.
        first = rows.gather(1, kept.argmax(1, keepdim=True).expand(-1, 1, rows.shape[-1]))
        largest: Tensor = torch.where(kept > 0, rows, first).amax(1) * kept.amax(1)
        return largest
    total: Tensor = (rows * kept).sum(1)
    return total if mode == "sum" else total / kept.sum(1).clamp(min=1)


def length(func: Any, x: Tensor) -> int:
    """`len` of a tensor. Raises ModelError for samples, because `len` would fix their number."""
    if x.dim() == 0 or not isinstance(x.shape[0], SymInt):
        return int(func(x))
    raise ModelError(
        "len() of a batch{place} gives a fixed number, but one recording must serve all batch "
        "sizes. Write x.shape[0] or x.size(0) instead of len(x).",
        code="model.fixed-batch",
        place=called_place(),
    )


def getitem(func: Any, x: Tensor, index: Any) -> Any:
    """`x[index]`. Raises ModelError if the index is a name, as in a dictionary of inputs."""
    if not isinstance(index, str):
        return func(x, index)
    raise ModelError(
        "The model reads the input {name!r} from a dictionary{place}. Give the shape of each "
        "input: --input NAME:SHAPE, or --input NAME:SHAPE:int64 for ids, in place of "
        "--input-shape. In Python, use `pack_inputs`; in a federation's file, use the key "
        "`inputs`.",
        code="model.inputs",
        name=index,
        place=called_place(),
    )


def unbind(func: Any, input: Tensor, dim: int = 0) -> Any:
    """`torch.unbind`, as `for row in x` calls it. Raises ModelError for the rows of a batch."""
    if input.dim() == 0 or not isinstance(input.shape[dim], SymInt):
        return func(input, dim)
    raise ModelError(
        "The model loops over the samples of a batch{place}, and one recording must serve all "
        "batch sizes. Compute all samples at once: operators have a batch axis. If forward takes "
        "several inputs as one tuple, give forward an argument for each input, and give the shapes "
        "with --input.",
        code="model.fixed-batch",
        place=called_place(),
    )


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
    var = var + (var.clamp(min=eps) - var).detach()  # the gradient is that of `var`
    loss: Tensor = 0.5 * (var.log() + (input - target).square() / var)
    loss = loss + 0.5 * math.log(2 * math.pi) if full else loss
    return loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.mean()


def numpy_array(*_: Any, **__: Any) -> NoReturn:
    """`Tensor.numpy`. Always raises ModelError, because a recording does not follow NumPy."""
    raise ModelError(
        "The model turns a tensor into a NumPy array{place}, and a recording does not follow "
        "NumPy. Compute with torch.",
        code="model.data-dependent-code",
        place=called_place(),
    )


def formatted(func: Any, x: Tensor, spec: str) -> str:
    """`format` of a tensor, as in `f"{x:.2f}"`. A recording has no values: it writes nan."""
    if not isinstance(x, FakeTensor) or not spec or x.dim():
        return str(func(x, spec))
    return format(math.nan, spec.replace("d", "f"))


def called_place() -> str:
    """The user's line that is running, in parentheses; or empty."""
    return source_lines.parenthesized(source_lines.running_line())


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


def gates(
    input: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None
) -> tuple[Tensor, Tensor]:
    """Two terms of all gates of a cell: one computed from the input, one from the state."""
    return functional.linear(input, w_ih, b_ih), functional.linear(h, w_hh, b_hh)


def lstm_cell(_: Any, input: Tensor, hx: State, *weights: Any, **named: Any) -> State:
    """A step of `nn.LSTMCell`."""
    h, c = hx
    from_x, from_h = gates(input, h, *weights, **named)
    i, f, g, o = (from_x + from_h).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru_cell(_: Any, input: Tensor, hx: Tensor, *weights: Any, **named: Any) -> Tensor:
    """A step of `nn.GRUCell`."""
    both = gates(input, hx, *weights, **named)
    (rx, zx, nx), (rh, zh, nh) = (value.chunk(3, -1) for value in both)
    n = (nx + (rx + rh).sigmoid() * nh).tanh()
    return n + (zx + zh).sigmoid() * (hx - n)


def rnn_cell(nonlinearity: Callable[[Tensor], Tensor]) -> Replacement:
    """A step of `nn.RNNCell` with this `nonlinearity`."""

    def cell(_: Any, input: Tensor, hx: Tensor, *weights: Any, **named: Any) -> Tensor:
        from_x, from_h = gates(input, hx, *weights, **named)
        return nonlinearity(from_x + from_h)

    return cell


def data_of(_: Any, x: Tensor) -> Tensor:
    """`x.data`: its value without a gradient. torch cannot record the attribute."""
    return x.detach()


def set_data(_: Any, x: Tensor, value: Tensor) -> None:
    """`x.data = value`: a write into `x`, without a gradient.

    Raises ModelError for results of operators and for values of another shape.
    """
    if (x.is_leaf or not x.requires_grad) and x.shape == value.shape:
        x.detach().copy_(value.detach())
        return
    raise ModelError(
        "The model replaces the `data` of a tensor by values of another shape, or the `data` of a "
        "result{place}. Compute with the new value instead, as in F.linear(x, weight[:8]).",
        code="model.writes-own-tensor",
        place=called_place(),
    )


FORMS: dict[Any, Replacement] = {
    **INDEXING,
    **STATISTICS,
    Tensor.data.__get__: data_of,  # type: ignore[attr-defined]
    Tensor.data.__set__: set_data,  # type: ignore[attr-defined]
    torch.prod: prod,
    Tensor.prod: prod,
    torch.cumprod: cumprod,
    Tensor.cumprod: cumprod,
    torch.cummax: cummax,
    Tensor.cummax: cummax,
    torch.cummin: cummin,
    Tensor.cummin: cummin,
    torch.median: median,
    Tensor.median: median,
    torch.kthvalue: kthvalue,
    Tensor.kthvalue: kthvalue,
    torch.cdist: cdist,
    torch.renorm: renorm,
    Tensor.renorm: renorm,
    functional.embedding_bag: embedding_bag,
    Tensor.__len__: length,
    Tensor.__getitem__: getitem,
    torch.unbind: unbind,
    Tensor.unbind: unbind,
    torch.logit: logit,
    Tensor.logit: logit,
    torch.special.logit: logit,
    functional.one_hot: one_hot,
    functional.gaussian_nll_loss: gaussian_nll_loss,
    Tensor.__format__: formatted,
    Tensor.numpy: numpy_array,
    Tensor.__array__: numpy_array,
    torch.fake_quantize_per_tensor_affine: fake_quantize,
    torch.lstm_cell: lstm_cell,
    torch.gru_cell: gru_cell,
    torch.rnn_tanh_cell: rnn_cell(torch.tanh),
    torch.rnn_relu_cell: rnn_cell(torch.relu),
}
"""What is recorded in place of each of these functions."""
