"""Sparse matrices as lists of indices and values, because neither format has sparse tensors.

A product gathers the rows of the other factor, multiplies them by the values and adds them up:
(A x)_i = sum over the entries (i, j) of A_ij x_j. Time and memory grow with the entries of the
matrix, not with its size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from exporters.programs.source_lines import called_place
from exporters.recording.replacements.shown_attributes import show
from exporters.recurrence.replacements import Replacement
from profiles.errors import ModelError

ENTRIES = "{}_entries", "{}_numbers"
"""The names of the buffers that keep the indices and the values of a matrix."""


def with_sparse_matrices(model: nn.Module) -> nn.Module:
    """Keep each sparse matrix among the buffers and attributes of `model`'s modules as indices and
    values, in place. Code of the model sees a `SparseMatrix`.

    Returns:
        The same model.

    Examples:
        >>> model = nn.Module()
        >>> model.links = torch.eye(3).to_sparse()
        >>> with_sparse_matrices(model).links @ torch.ones(3, 2)
        tensor([[1., 1.],
                [1., 1.],
                [1., 1.]])
    """
    for module in model.modules():
        forms = {}
        for name, value in [*vars(module).items(), *module._buffers.items()]:
            if not isinstance(value, Tensor) or value.layout == torch.strided or value.dim() != 2:
                continue
            matrix = value.detach().to_sparse().coalesce()
            delattr(module, name)
            for own, part in zip(ENTRIES, (matrix.indices(), matrix.values()), strict=True):
                module.register_buffer(own.format(name), part.clone(), persistent=False)
            forms[name] = _kept(name, matrix.shape)
        if forms:
            show(module, forms)
    return model


def _kept(name: str, size: torch.Size) -> Callable[[nn.Module], "SparseMatrix"]:
    places, numbers = (own.format(name) for own in ENTRIES)
    return lambda m: SparseMatrix(getattr(m, places), getattr(m, numbers), size)


class SparseMatrix:
    """A sparse matrix (n, m): `entries` (2, e) are rows and columns, `numbers` (e,) the values.

    Entries of one place add up, as in PyTorch. It computes what models of graphs need: products
    with dense matrices, its transpose, and its parts.
    """

    is_sparse = True

    def __init__(self, entries: Tensor, numbers: Tensor, size: tuple[int, ...]) -> None:
        self._entries, self._numbers, self.shape = entries, numbers, torch.Size(size)
        self.dtype, self.device = numbers.dtype, numbers.device

    def __matmul__(self, dense: Tensor) -> Tensor:
        """The product with `dense` (m, k) or (m,)."""
        numbers = self._numbers.reshape(-1, *[1] * (dense.dim() - 1))
        terms = numbers * dense.index_select(0, self._entries[1])
        out = dense.new_zeros(self.shape[0], *dense.shape[1:])
        return out.index_add(0, self._entries[0], terms)

    def __rmatmul__(self, dense: Tensor) -> Tensor:
        """The product of `dense` (k, n) or (n,) with this matrix."""
        return (self.t() @ dense.t()).t() if dense.dim() == 2 else self.t() @ dense

    def t(self) -> "SparseMatrix":
        """The transposed matrix."""
        return SparseMatrix(self._entries.flip(0), self._numbers, self.shape[::-1])

    def to_dense(self) -> Tensor:
        """The dense matrix."""
        return self @ torch.eye(self.shape[1], dtype=self.dtype)

    def itself(self, *_: Any, **__: Any) -> "SparseMatrix":
        """The same matrix: it has one form and one device."""
        return self

    coalesce = to = float = cpu = detach = contiguous = to_sparse = to_sparse_coo = itself

    def size(self, axis: int | None = None) -> Any:
        """The size of `axis`, or all sizes."""
        return self.shape if axis is None else self.shape[axis]

    def indices(self) -> Tensor:
        """The rows and columns (2, e)."""
        return self._entries

    def values(self) -> Tensor:
        """The values (e,)."""
        return self._numbers

    mm = matmul = mv = __matmul__
    T, _indices, _values = property(t), indices, values

    def __getattr__(self, name: str) -> Any:
        """Refuse all other attributes, with the user's line."""
        raise AttributeError(name) if name.startswith("__") else _refused(name)

    @classmethod
    def __torch_function__(
        cls, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute products and transposes; refuse other functions."""
        name, more = func.__name__.strip("_"), kwargs or {}
        if name in PRODUCTS and len(args) == 2 and not more:
            first, second = args
            return first @ second if isinstance(first, cls) else second.__rmatmul__(first)
        if name in ("t", "transpose"):
            return args[0].t()
        raise _refused(name)


PRODUCTS = ("sparse_mm", "mm", "matmul", "mv")


def sparse_matrix(_: Any, indices: Tensor, values: Tensor, size: Any, **__: Any) -> SparseMatrix:
    """`torch.sparse_coo_tensor` of a fixed size."""
    return SparseMatrix(torch.as_tensor(indices), torch.as_tensor(values), tuple(size))


def product(_: Any, first: Any, second: Any, *__: Any) -> Any:
    """`torch.sparse.mm`, also of matrices that are dense when recorded."""
    return first @ second


SPARSE_MATRICES: dict[Any, Replacement] = {
    torch.sparse_coo_tensor: sparse_matrix,
    torch.sparse.mm: product,
    Tensor.to_sparse: lambda _, input, *__: input,
    Tensor.to_dense: lambda _, input, *__: input,
}
"""What is recorded in place of functions that make sparse tensors or take them."""


def _refused(operator: str) -> ModelError:
    return ModelError(
        "The model uses `{operator}` of a sparse matrix{place}. Only these can be exported: "
        "t(), indices(), values(), to_dense(), and products with dense matrices.",
        code="model.sparse-tensor",
        operator=operator,
        place=called_place(),
    )
