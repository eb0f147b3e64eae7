"""Functions of torch that are recorded as other operators, which have gradients in both formats."""

import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import SymInt, Tensor
from torch.nn import functional

from exporters.programs import source_lines
from exporters.recording.replacements.index_forms import INDEXING
from exporters.recurrence.replacements import Replacement
from profiles.errors import ModelError

LARGEST_PRODUCT = 256
"""A product over an axis with more factors than this is recorded as torch's own operator."""

State = tuple[Tensor, Tensor]
Computes = Callable[..., Tensor]


def prod(func: Computes, x: Tensor, *given: Any, **more: Any) -> Tensor:
    """`torch.prod` over one axis, by halves. The gradient is correct even if factors are zero."""
    dim = more.get("dim", given[0] if given else None)
    keepdim = more.get("keepdim", given[1] if len(given) > 1 else False)
    if type(dim) is not int or x.dim() == 0 or more.get("dtype") is not None:
        return func(x, *given, **more)
    size = x.shape[dim]
    if not isinstance(size, int) or not 0 < size <= LARGEST_PRODUCT or not x.is_floating_point():
        return func(x, *given, **more)
    while size > 1:
        half = size // 2
        product = x.narrow(dim, 0, half) * x.narrow(dim, half, half)
        rest = [x.narrow(dim, 2 * half, 1)] if size % 2 else []
        x = torch.cat([product, *rest], dim) if rest else product
        size = half + len(rest)
    return x if keepdim else x.squeeze(dim)


def cumprod(func: Computes, x: Tensor, dim: int, **more: Any) -> Tensor:
    """`torch.cumprod`. In each round, each product covers twice as many factors as before."""
    size = x.shape[dim] if x.dim() else 0
    if more or not isinstance(size, int) or not 0 < size <= LARGEST_PRODUCT:
        return func(x, dim, **more)
    shift = 1
    while shift < size:
        ones = torch.ones_like(x.narrow(dim, 0, shift))
        x = x * torch.cat([ones, x.narrow(dim, 0, size - shift)], dim)
        shift *= 2
    return x


def cummax(func: Any, x: Tensor, dim: int) -> Any:
    """`torch.cummax`: in each round, the maximum of twice as many elements."""
    size = x.shape[dim] if x.dim() else 0
    if not isinstance(size, int) or not 0 < size <= LARGEST_PRODUCT:
        return func(x, dim)
    along = [1] * x.dim()
    along[dim] = size
    largest, indices = x.detach(), torch.arange(size).view(along).expand(x.shape)
    shift = 1
    while shift < size:
        # The first elements are compared with themselves. The last of equal ones counts.
        before, place = (
            torch.cat([v.narrow(dim, 0, shift), v.narrow(dim, 0, size - shift)], dim)
            for v in (largest, indices)
        )
        keep = largest >= before
        largest, indices = torch.where(keep, largest, before), torch.where(keep, indices, place)
        shift *= 2
    return torch.return_types.cummax((x.gather(dim, indices), indices))


def cummin(func: Any, x: Tensor, dim: int) -> Any:
    """`torch.cummin`."""
    values, indices = cummax(torch.cummax, -x, dim)
    return torch.return_types.cummin((-values, indices))


def median(func: Any, x: Tensor, *given: Any, **more: Any) -> Any:
    """`torch.median` along an axis: the lower of the two middle values."""
    dim = more.get("dim", given[0] if given else None)
    if dim is None or not isinstance(x.shape[dim], int):
        return func(x, *given, **more)
    keepdim = more.get("keepdim", given[1] if len(given) > 1 else False)
    return torch.return_types.median(ranked(x, (x.shape[dim] - 1) // 2, dim, keepdim))


def kthvalue(func: Any, x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """`torch.kthvalue`."""
    return torch.return_types.kthvalue(ranked(x, k - 1, dim, keepdim))


def ranked(x: Tensor, rank: int, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    """The value with the number `rank` in ascending order, and its index."""
    values, indices = (part.narrow(dim, rank, 1) for part in x.sort(dim))
    return (values, indices) if keepdim else (values.squeeze(dim), indices.squeeze(dim))


def cdist(_: Any, a: Tensor, b: Tensor, p: float = 2.0, *__: Any, **___: Any) -> Tensor:
    """`torch.cdist`: the norms of all differences."""
    norms: Tensor = torch.linalg.vector_norm(a.unsqueeze(-2) - b.unsqueeze(-3), p, -1)
    return norms


def embedding_bag(func: Computes, ids: Tensor, weight: Tensor, *given: Any, **more: Any) -> Tensor:
    """`embedding_bag` of bags of one size: the sum, the mean or the maximum of embeddings."""
    mode, weights = more.get("mode", "mean"), more.get("per_sample_weights")
    if ids.dim() != 2 or given or more.get("max_norm") is not None or more.get("sparse"):
        return func(ids, weight, *given, **more)
    if more.get("padding_idx") is not None:
        return func(ids, weight, *given, **more)
    rows = functional.embedding(ids, weight)
    rows = rows if weights is None else rows * weights.unsqueeze(-1)
    return {"sum": rows.sum, "mean": rows.mean, "max": rows.amax}[mode](1)


def length(func: Any, x: Tensor) -> int:
    """`len` of a tensor. Raises ModelError for samples: `len` returns a fixed number."""
    if x.dim() == 0 or not isinstance(x.shape[0], SymInt):
        return int(func(x))
    raise ModelError(
        "len() of a batch{place} gives a fixed number, but one recording must serve all batch "
        "sizes. Write x.shape[0] or x.size(0) instead of len(x).",
        code="model.fixed-batch",
        place=called_place(),
    )


def unbind(func: Any, x: Tensor, dim: int = 0) -> Any:
    """`torch.unbind`, as `for row in x` calls it. Raises ModelError for the rows of a batch."""
    if x.dim() == 0 or not isinstance(x.shape[dim], SymInt):
        return func(x, dim)
    raise ModelError(
        "The model loops over the samples of a batch{place}, and one recording must serve all "
        "batch sizes. Compute all samples at once: operators have a batch axis.",
        code="model.fixed-batch",
        place=called_place(),
    )


def one_hot(func: Computes, x: Tensor, num_classes: int = -1) -> Tensor:
    """`one_hot`. Raises ModelError without `num_classes`, as torch then reads the values."""
    if num_classes != -1:
        return func(x, num_classes)
    raise ModelError(
        "one_hot without num_classes{place} reads the largest class of the batch. Pass the number "
        "of classes: one_hot(x, num_classes).",
        code="model.data-dependent-code",
        place=called_place(),
    )


def numpy_array(*_: Any, **__: Any) -> NoReturn:
    """`Tensor.numpy`. Raises ModelError: a recording does not follow NumPy."""
    raise ModelError(
        "The model turns a tensor into a NumPy array{place}, and a recording does not follow "
        "NumPy. Compute with torch.",
        code="model.data-dependent-code",
        place=called_place(),
    )


def called_place() -> str:
    """The user's line that is running, in parentheses; or empty."""
    frames = ((frame.filename, frame.lineno or 0) for frame in traceback.extract_stack())
    return source_lines.parenthesized(source_lines.innermost(frames))


def fake_quantize(func: Computes, x: Tensor, scale: Any, zero: Any, *bounds: int) -> Tensor:
    """`torch.fake_quantize_per_tensor_affine` of fixed steps; what is cut gets no gradient."""
    if isinstance(scale, Tensor) or isinstance(zero, Tensor) or len(bounds) != 2:
        return func(x, scale, zero, *bounds)
    low, high = bounds
    steps = (x.detach() / scale).round() + zero
    kept = torch.where((steps >= low) & (steps <= high), x, 0.0)
    change: Tensor = (steps.clamp(low, high) - zero) * scale - kept
    return kept + change.detach()


def logit(_: Any, x: Tensor, eps: float | None = None) -> Tensor:
    """`torch.logit`: ln(x / (1 - x))."""
    x = x if eps is None else x.clamp(eps, 1 - eps)
    return (x / (1 - x)).log()


def gates(x: Tensor, h: Tensor, weights: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """For all gates together, the terms from a cell's input and the terms from its state."""
    w_ih, w_hh, b_ih, b_hh = (*weights, None, None)[:4]
    return functional.linear(x, w_ih, b_ih), functional.linear(h, w_hh, b_hh)


def lstm_cell(_: Any, x: Tensor, state: State, *weights: Any) -> State:
    """A step of `nn.LSTMCell`."""
    h, c = state
    from_x, from_h = gates(x, h, weights)
    i, f, g, o = (from_x + from_h).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru_cell(_: Any, x: Tensor, h: Tensor, *weights: Any) -> Tensor:
    """A step of `nn.GRUCell`."""
    (rx, zx, nx), (rh, zh, nh) = (value.chunk(3, -1) for value in gates(x, h, weights))
    n = (nx + (rx + rh).sigmoid() * nh).tanh()
    return n + (zx + zh).sigmoid() * (h - n)


def rnn_cell(nonlinearity: Callable[[Tensor], Tensor]) -> Replacement:
    """A step of `nn.RNNCell` with this `nonlinearity`."""

    def cell(_: Any, x: Tensor, h: Tensor, *weights: Any) -> Tensor:
        from_x, from_h = gates(x, h, weights)
        return nonlinearity(from_x + from_h)

    return cell


def data_of(_: Any, x: Tensor) -> Tensor:
    """`x.data`: its value without a gradient. torch cannot record the attribute."""
    return x.detach()


def set_data(_: Any, x: Tensor, value: Tensor) -> NoReturn:
    """`x.data = value`. Raises ModelError: a graph does not change what a tensor is."""
    raise ModelError(
        "The model replaces the `data` of a tensor{place}. Compute with the new value instead, as "
        "in F.linear(x, weight.clamp(-1, 1)).",
        code="model.writes-own-tensor",
        place=called_place(),
    )


FORMS: dict[Any, Replacement] = {
    **INDEXING,
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
    functional.embedding_bag: embedding_bag,
    Tensor.__len__: length,
    torch.unbind: unbind,
    Tensor.unbind: unbind,
    torch.logit: logit,
    Tensor.logit: logit,
    torch.special.logit: logit,
    functional.one_hot: one_hot,
    Tensor.numpy: numpy_array,
    Tensor.__array__: numpy_array,
    torch.fake_quantize_per_tensor_affine: fake_quantize,
    torch.lstm_cell: lstm_cell,
    torch.gru_cell: gru_cell,
    torch.rnn_tanh_cell: rnn_cell(torch.tanh),
    torch.rnn_relu_cell: rnn_cell(torch.relu),
}
"""What is recorded in place of each of these functions."""
