"""Layers with factor matrices U and V, and the conversion from and to dense weights.

A weight of `groups` groups is unrolled to matrices W_g (rows, columns), with W_g = U_g V_g^T:

    convolution (n, m / groups, kh, kw)     W_g (m / groups * kh, n / groups * kw), as in FedHM
    1-D convolution (n, m / groups, k)      W_g (m / groups * k, n / groups)
    matrix (n, m)                           its transpose
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from toolkit.factorization.factorizer import Factorizer
from toolkit.factorization.truncated_svd import unroll
from toolkit.submodels.matrix_product import Product
from toolkit.submodels.weighted_layers import Convolution, copy_settings


def unroll_groups(weight: Tensor, groups: int) -> tuple[Tensor, ...]:
    """The matrices W_g of `weight`."""
    return tuple(unroll(part) for part in weight.chunk(groups))


def factor_weights(
    factorizer: Factorizer, name: str, weight: Tensor, rank: int, groups: int = 1
) -> tuple[Tensor, Tensor]:
    """Weights of the layers `u` and `v` that replace a dense weight.

    Args:
        factorizer: Computes and caches the factors.
        name: Name of the weight.
        weight: The dense weight.
        rank: The rank r; reduced to the full rank of the matrices if the full rank is smaller.
        groups: Groups of the convolution.

    Returns:
        (groups * r, m / groups, kh, 1) and (n, r, 1, kw), without the axes that `weight` lacks.
    """
    pairs = [
        factorizer.truncated(f"{name}/{group}", matrix, rank)
        for group, matrix in enumerate(unroll_groups(weight, groups))
    ]
    us, vs = zip(*pairs, strict=True)
    # The SVD cannot give more components than the matrix has.
    rank = us[0].shape[1]
    kernel, columns = weight.shape[2:], weight.shape[3:]
    per_group = weight.shape[0] // groups
    u_shape = (weight.shape[1], *kernel[:1], *(1 for _ in columns), rank)
    v_shape = (per_group, *(1 for _ in kernel[:1]), *columns, rank)
    u = torch.cat([side.reshape(u_shape).movedim(-1, 0) for side in us])
    return u.contiguous(), torch.cat([side.reshape(v_shape).movedim(-1, 1) for side in vs])


def factor_matrices(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """U (groups, rows, r) and V (groups, columns, r) from the weights of the layers `u` and `v`.

    Raises ValueError if their ranks differ.
    """
    rank = v.shape[1]
    if u.dim() != v.dim() or rank < 1 or u.shape[0] % rank or v.shape[0] % (u.shape[0] // rank):
        raise ValueError(f"{tuple(u.shape)} and {tuple(v.shape)} are not factors of the same rank")
    groups = u.shape[0] // rank
    left = u.reshape(groups, rank, -1).transpose(1, 2)
    right = v.reshape(groups, v.shape[0] // groups, rank, -1).movedim(2, -1)
    return left, right.reshape(groups, -1, rank)


def compose_weight(u: Tensor, v: Tensor) -> Product | Tensor:
    """Compose U V^T in the layout of the dense weight (model shape alignment, FedHM eq. 1).

    Args:
        u: Weight of the layer `u`.
        v: Weight of the layer `v`.

    Returns:
        If there is one group, a `Product` that is not multiplied out; else the dense tensor.

    Raises:
        ValueError: If the ranks of `u` and `v` differ.
    """
    groups = factor_matrices(u, v)[0].shape[0]
    if groups == 1:
        return compose_group(u, v)
    pairs = zip(u.chunk(groups), v.chunk(groups), strict=True)
    return torch.cat([compose_group(a, b).dense() for a, b in pairs])


def compose_group(u: Tensor, v: Tensor) -> Product:
    """U V^T of one group in the layout of the dense weight; see `compose_weight`."""
    if u.dim() == 2:
        return Product(v, u, shape=(v.shape[0], u.shape[1]), axes=(0, 1))
    rows, columns = u.shape[:3], v.shape[3:]
    if u.shape[3:].numel() != 1 or v.shape[2] != 1:
        raise ValueError(f"{tuple(u.shape)}, {tuple(v.shape)} are not (r, m, kh, 1), (n, r, 1, kw)")
    return Product(
        u.reshape(rows).permute(1, 2, 0),
        v.squeeze(2).transpose(0, 1),
        shape=(v.shape[0], *rows[1:], *columns),
        axes=(1, 2, 0, 3)[: u.dim()],
    )


def composed_weight(layer: nn.Module) -> Tensor:
    """Compose the dense weight, which some models (nn.TransformerEncoder) read from the layer."""
    weight = compose_weight(layer.u.weight, layer.v.weight)  # type: ignore[arg-type, union-attr]
    return weight.dense() if isinstance(weight, Product) else weight


def bias_of_v(layer: nn.Module) -> Tensor | None:
    """The bias of the layer, which is the bias of `v`."""
    return layer.v.bias  # type: ignore[return-value, union-attr]


class FactorizedConvolution(nn.Module):
    """A kh x 1 convolution `u` to `rank` channels in each group, then a 1 x kw convolution `v`.

    A 1-D convolution becomes two convolutions: the first has the same kernel, and the second has
    kernel size 1.
    """

    weight = property(composed_weight)
    bias = property(bias_of_v)

    def __init__(self, dense: Convolution, rank: int) -> None:
        super().__init__()
        copy_settings(self, dense)
        inner = rank * dense.groups
        self.u = convolution_along_axis(dense, 0, dense.in_channels, inner, bias=False)
        self.v = convolution_along_axis(dense, 1, inner, dense.out_channels, bias=False)
        self.v.register_parameter("bias", bias_of(dense))

    def forward(self, x: Tensor) -> Tensor:
        """(N, m, H, W) -> (N, n, H', W')."""
        return self.v(self.u(x))  # type: ignore[no-any-return]


def bias_of(dense: nn.Module) -> nn.Parameter | None:
    """The bias of `dense`, frozen or not; None if `dense` has no bias."""
    return dict(dense.named_parameters(recurse=False)).get("bias")


def convolution_along_axis(
    dense: Convolution, axis: int, inputs: int, outputs: int, bias: bool
) -> nn.Module:
    """A convolution with the kernel of `dense` along one spatial axis and kernel size 1 elsewhere.

    Stride, padding and dilation also apply to that axis only.
    """

    def only(values: Sequence[int], other: int) -> tuple[int, ...]:
        return tuple(v if number == axis else other for number, v in enumerate(values))

    padding = dense.padding
    make: Any = type(dense)
    convolution: nn.Module = make(
        inputs,
        outputs,
        only(dense.kernel_size, 1),
        stride=only(dense.stride, 1),
        padding=padding if isinstance(padding, str) else only(padding, 0),
        dilation=only(dense.dilation, 1),
        groups=dense.groups,
        bias=bias,
        padding_mode=dense.padding_mode,
    )
    return convolution


class FactorizedLinear(nn.Module):
    """A linear layer `u` to `rank` features, then a linear layer `v`."""

    weight = property(composed_weight)
    bias = property(bias_of_v)

    def __init__(self, dense: nn.Linear, rank: int) -> None:
        super().__init__()
        copy_settings(self, dense)
        self.u = nn.Linear(dense.in_features, rank, bias=False)
        self.v = nn.Linear(rank, dense.out_features, bias=False)
        self.v.register_parameter("bias", bias_of(dense))

    def forward(self, x: Tensor) -> Tensor:
        """(N, ..., m) -> (N, ..., n)."""
        return self.v(self.u(x))  # type: ignore[no-any-return]


class FactorizedProduct(nn.Module):
    """x @ weight + bias, with a weight (m, n) = `v.weight` (m, r) @ `u.weight` (r, n)."""

    weight = property(composed_weight)
    bias = property(bias_of_v)

    def __init__(self, dense: nn.Module, rank: int) -> None:
        super().__init__()
        inputs, outputs = dense.get_parameter("weight").shape
        self.u = nn.Linear(outputs, rank, bias=False)
        self.v = nn.Linear(rank, inputs, bias=False)
        self.v.register_parameter("bias", bias_of(dense))

    def forward(self, x: Tensor) -> Tensor:
        """(N, ..., m) -> (N, ..., n)."""
        return x @ self.v.weight @ self.u.weight + self.v.bias


class FactorizedRecurrence(nn.Module):
    """A recurrent layer whose weight matrices are products of `v` (n, r) and `u` (r, m).

    It computes with the products. This reduces the numbers to train and to send, but not the
    computation.
    """

    def __init__(self, dense: nn.RNNBase, ranks: Mapping[str, int]) -> None:
        super().__init__()
        copy_settings(self, dense)
        own = dict(dense.named_parameters())
        # The products are about as large as the weights of a new layer. Larger ones would make the
        # states explode over many steps.
        sizes = {k: (*own[k].shape, r) for k, r in ranks.items()}
        self.u = nn.ParameterDict({k: torch.randn(r, m) / m**0.5 for k, (_, m, r) in sizes.items()})
        self.v = nn.ParameterDict({k: torch.randn(n, r) / r**0.5 for k, (n, _, r) in sizes.items()})
        self.rest = nn.ParameterDict({k: p for k, p in own.items() if k not in ranks})
        self._dense = (dense,)  # In a tuple, so that torch does not register its weights here.

    def flatten_parameters(self) -> None:
        """Do nothing, as PyTorch does on a CPU. Models call this method before the layer."""

    def forward(self, *arguments: Tensor, **options: Tensor) -> object:
        """Run the original recurrent layer with the composed weights."""
        composed = {name: self.v[name] @ self.u[name] for name in self.u}
        # The layer is not a submodule, so `train` and `eval` do not reach it.
        self._dense[0].train(self.training)
        tensors = {**composed, **dict(self.rest)}
        return functional_call(self._dense[0], tensors, arguments, options)
