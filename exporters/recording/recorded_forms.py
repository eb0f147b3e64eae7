"""Functions of torch that are recorded as other operators, which have gradients in both formats."""

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from exporters.programs import source_lines
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


def topk(func: Any, x: Tensor, k: int, *given: Any, **more: Any) -> Any:
    """`torch.topk` in sorted order. Otherwise each runtime chooses an order of its own."""
    dim = given[0] if given else more.get("dim", -1)
    largest = given[1] if len(given) > 1 else more.get("largest", True)
    return func(x, k, dim, largest, True)


def split(func: Any, x: Tensor, size: Any, dim: int = 0) -> Any:
    """`torch.split` of rows of samples: torch would compute the number of parts."""
    whole = x.shape[dim]
    if not isinstance(size, SymInt) or not isinstance(whole, SymInt):
        return func(x, size, dim)
    parts = whole.node.expr / size.node.expr
    if not parts.is_Integer:
        return func(x, size, dim)
    # The gradient of `unbind` puts the parts together; that of a slice writes into zeros.
    return x.unflatten(dim, (int(parts), size)).unbind(dim)


def chunk(func: Any, x: Tensor, chunks: int, dim: int = 0) -> Any:
    """`torch.chunk` of rows of samples, for example of two views of each sample."""
    whole = x.shape[dim]
    if not isinstance(whole, SymInt) or int(whole.node.expr.as_coeff_Mul()[0]) % chunks:
        return func(x, chunks, dim)
    return split(func, x, whole // chunks, dim)


def length(func: Any, x: Tensor) -> int:
    """`len` of a tensor. Raises ModelError for samples: `len` returns a fixed number."""
    if x.dim() == 0 or not isinstance(x.shape[0], SymInt):
        return int(func(x))
    frames = ((frame.filename, frame.lineno or 0) for frame in traceback.extract_stack())
    raise ModelError(
        "len() of a batch{place} gives a fixed number, but one recording must serve all batch "
        "sizes. Write x.shape[0] or x.size(0) instead of len(x).",
        code="model.fixed-batch",
        place=source_lines.parenthesized(source_lines.innermost(frames)),
    )


def bincount(func: Computes, x: Tensor, weights: Any = None, minlength: int = 0) -> Tensor:
    """`torch.bincount` of whole numbers below `minlength`, so that the size is fixed."""
    if minlength == 0 or weights is not None:
        return func(x, weights, minlength)
    return torch.zeros(minlength, dtype=torch.int64).scatter_add(0, x, torch.ones_like(x))


def eye(_: Any, n: Any, m: Any = None, *, dtype: Any = None, **__: Any) -> Tensor:
    """`torch.eye`, which torch computes from a type of integers that TFLite lacks."""
    rows, columns = torch.arange(n), torch.arange(n if m is None else m)
    return (rows[:, None] == columns).to(dtype or torch.get_default_dtype())


def constant(func: Computes, *given: Any, **more: Any) -> Tensor:
    """What `func` computes from numbers alone, as a constant of the recording."""
    if any(isinstance(value, Tensor | SymInt) for value in (*given, *more.values())):
        return func(*given, **more)
    with _disable_current_modes():
        values = func(*given, **more).numpy()
    return torch.tensor(values)


def searchsorted(
    func: Computes, ascending: Tensor, x: Any, *given: Any, right: bool = False, **more: Any
) -> Tensor:
    """`torch.searchsorted`: the number of `ascending` numbers below each of `x`."""
    if given or not isinstance(x, Tensor) or any(more.values()):
        return func(ascending, x, *given, right=right, **more)
    rows = ascending if ascending.dim() == 1 else ascending.unsqueeze(-2)
    compare = torch.le if right else torch.lt
    return compare(rows, x.unsqueeze(-1)).sum(-1)


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


FORMS: dict[Any, Replacement] = {
    torch.prod: prod,
    Tensor.prod: prod,
    torch.cumprod: cumprod,
    Tensor.cumprod: cumprod,
    torch.median: median,
    Tensor.median: median,
    torch.kthvalue: kthvalue,
    Tensor.kthvalue: kthvalue,
    torch.cdist: cdist,
    functional.embedding_bag: embedding_bag,
    torch.topk: topk,
    Tensor.topk: topk,
    torch.split: split,
    Tensor.split: split,
    torch.chunk: chunk,
    Tensor.chunk: chunk,
    Tensor.__len__: length,
    torch.eye: eye,
    torch.tril_indices: constant,
    torch.triu_indices: constant,
    torch.logspace: constant,
    torch.hamming_window: constant,
    torch.blackman_window: constant,
    torch.bartlett_window: constant,
    torch.kaiser_window: constant,
    torch.searchsorted: searchsorted,
    torch.bincount: bincount,
    Tensor.bincount: bincount,
    torch.lstm_cell: lstm_cell,
    torch.gru_cell: gru_cell,
    torch.rnn_tanh_cell: rnn_cell(torch.tanh),
    torch.rnn_relu_cell: rnn_cell(torch.relu),
}
"""What is recorded in place of each of these functions."""
