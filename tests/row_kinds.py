"""Building blocks of test rows: layers that wrap functions, and common shapes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from layer_cases import Row


class Function(nn.Module):
    """A layer that applies a function of one tensor."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Weighted(nn.Module):
    """A layer that applies a function of the samples and one parameter of `shape`."""

    def __init__(self, shape: tuple[int, ...], function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


class Attention(nn.Module):
    """Multi-head self-attention with one output."""

    def __init__(self, causal: bool = False, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = torch.full((length, length), -torch.inf).triu(1).to(x) if self.causal else None
        output: Tensor = self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        return output


class WithWeights(Attention):
    """Multi-head attention that also returns its weights, averaged over heads."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(self.attention(x, x, x), 2)


class Residual(nn.Module):
    """A block with a skip connection."""

    def __init__(self, block: nn.Module, skip: nn.Module | None = None) -> None:
        super().__init__()
        self.block, self.skip = block, skip or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + self.skip(x)


def layer(kind: Callable[..., nn.Module], *args: Any, **options: Any) -> Callable[[], nn.Module]:
    return partial(kind, *args, **options)


def of(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return partial(Function, function)


def with_weight(
    shape: tuple[int, ...], function: Callable[..., Tensor]
) -> Callable[..., nn.Module]:
    return partial(Weighted, shape, function)


def attend(x: Tensor, **options: Any) -> Tensor:
    """Scaled dot product attention of x (N, 2 heads, length, width) with copies of itself."""
    return functional.scaled_dot_product_attention(x, x.flip(2), x * 0.5, **options)


def in_order(x: Tensor) -> Tensor:
    """The causal mask: each query sees the keys up to its own position."""
    return torch.ones(x.shape[2], x.shape[2], dtype=torch.bool).tril()


def elementwise(**functions: Callable[[Tensor], Tensor]) -> dict[str, Row]:
    return {name: Row(of(function), (3, 4)) for name, function in functions.items()}


encoder = partial(layer, nn.TransformerEncoderLayer, 8, 2, 12, dropout=0.0, batch_first=True)
conv1d, conv2d = partial(layer, nn.Conv1d), partial(layer, nn.Conv2d)
back1d, back2d = partial(layer, nn.ConvTranspose1d), partial(layer, nn.ConvTranspose2d)
IMAGE = (3, 6, 7)
PICK = torch.tensor([2, 0, 2])
PLACES = torch.tensor([[0, 3, 1], [2, 2, 0]])


class Pair(nn.Module):
    """A bilinear layer of the samples and their sines."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x, x.sin())
        return output
