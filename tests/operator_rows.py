"""One row a case of each operator group in `exporters.coverage`: a layer and its sample's shape."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, einsum, nn
from torch.nn import functional

from layer_cases import Row


class Function(nn.Module):
    """A function of one tensor as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Weighted(nn.Module):
    """A function of samples and one parameter of `shape`."""

    def __init__(self, shape: tuple[int, ...], function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


class Attention(nn.Module):
    """Multi-head self-attention, one output."""

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
    """Multi-head attention and beside it the weights, the mean of all heads'."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(self.attention(x, x, x), 2)


class Residual(nn.Module):
    """A block around which its input is carried."""

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
    """Scaled dot product attention of x (N, 2 heads, length, width) with parts of itself."""
    return functional.scaled_dot_product_attention(x, x.flip(2), x * 0.5, **options)


def in_order(x: Tensor) -> Tensor:
    """Keys that a query may see: its own place and those before."""
    return torch.ones(x.shape[2], x.shape[2], dtype=torch.bool).tril()


def elementwise(**functions: Callable[[Tensor], Tensor]) -> dict[str, Row]:
    return {name: Row(of(function), (3, 4)) for name, function in functions.items()}


encoder = partial(layer, nn.TransformerEncoderLayer, 8, 2, 12, dropout=0.0, batch_first=True)
conv1d, conv2d = partial(layer, nn.Conv1d), partial(layer, nn.Conv2d)
back1d, back2d = partial(layer, nn.ConvTranspose1d), partial(layer, nn.ConvTranspose2d)
IMAGE = (3, 6, 7)
PICK = torch.tensor([2, 0, 2])
PLACES = torch.tensor([[0, 3, 1], [2, 2, 0]])

ROWS: dict[str, dict[str, Row]] = {
    "convolution": {
        "conv2d": Row(conv2d(3, 4, 3), (3, 6, 7)),
        "conv2d padding": Row(conv2d(3, 4, 3, padding=1), (3, 6, 7)),
        "conv2d more padding than kernel": Row(conv2d(2, 3, 2, padding=3), (2, 4, 5)),
        "conv2d uneven padding": Row(conv2d(3, 4, 3, padding=(0, 2)), (3, 6, 5)),
        "conv2d same": Row(conv2d(3, 4, 3, padding="same"), (3, 6, 5)),
        "conv2d no bias": Row(conv2d(3, 4, 3, padding=1, bias=False), (3, 6, 7)),
        "conv2d stride": Row(conv2d(3, 4, 3, stride=2, padding=1), (3, 6, 6)),
        "conv2d stride, rest left over": Row(conv2d(3, 4, 3, stride=3), (3, 8, 7)),
        "conv2d stride above kernel": Row(conv2d(3, 4, 2, stride=3), (3, 9, 7)),
        "conv2d uneven stride": Row(conv2d(3, 4, 3, stride=(1, 2), padding=1), (3, 5, 8)),
        "conv2d dilation": Row(conv2d(3, 4, 3, dilation=2, padding=2), (3, 7, 6)),
        "conv2d uneven dilation": Row(conv2d(3, 4, 3, dilation=(1, 2)), (3, 5, 8)),
        "conv2d stride, padding, dilation": Row(
            conv2d(2, 3, (3, 2), stride=(2, 3), padding=(2, 1), dilation=(2, 3)), (2, 9, 10)
        ),
        "conv2d groups": Row(conv2d(4, 6, 3, groups=2, padding=1), (4, 5, 6)),
        "conv2d groups, stride, dilation": Row(
            conv2d(6, 3, 3, groups=3, stride=2, padding=2, dilation=2), (6, 8, 7)
        ),
        "conv2d depthwise": Row(conv2d(4, 4, 3, groups=4, padding=1), (4, 6, 5)),
        "conv2d depthwise with multiplier": Row(conv2d(3, 6, 3, groups=3, stride=2), (3, 7, 7)),
        "conv2d 1x1": Row(conv2d(3, 5, 1), (3, 4, 6)),
        "conv2d 1x1 stride": Row(conv2d(3, 5, 1, stride=2), (3, 5, 6)),
        "conv2d kx1": Row(conv2d(3, 2, (3, 1), padding=(1, 0)), (3, 6, 5)),
        "conv2d 1xk": Row(conv2d(2, 4, (1, 3), padding=(0, 1), stride=(1, 2)), (2, 4, 7)),
        "conv2d few outputs": Row(conv2d(6, 3, (3, 1), padding=(2, 0), dilation=(2, 1)), (6, 8, 9)),
        "conv2d few outputs, groups": Row(conv2d(8, 4, 3, groups=2), (8, 9, 8)),
        "conv2d few inputs": Row(conv2d(3, 7, (2, 3), padding=1), (3, 8, 8)),
        "conv2d even kernel": Row(conv2d(3, 4, (2, 4), padding=(1, 2)), (3, 6, 7)),
        "conv2d kernel of the image": Row(conv2d(2, 4, (4, 5)), (2, 4, 5)),
        "conv2d one channel": Row(conv2d(1, 1, 3, padding=1), (1, 4, 4)),
        "conv1d": Row(conv1d(3, 4, 3, padding=1), (3, 9)),
        "conv1d stride, dilation": Row(conv1d(3, 4, 3, stride=2, padding=2, dilation=2), (3, 10)),
        "conv1d groups, even kernel": Row(conv1d(4, 6, 4, groups=2), (4, 9)),
    },
    "transposed convolution": {
        "plain": Row(back2d(3, 4, 3), IMAGE),
        "no bias": Row(back2d(3, 4, 3, bias=False), IMAGE),
        "stride": Row(back2d(3, 4, 2, stride=2), IMAGE),
        "stride, padding, output padding": Row(
            back2d(3, 4, 3, stride=2, padding=1, output_padding=1), IMAGE
        ),
        "uneven": Row(
            back2d(2, 3, (3, 2), stride=(2, 3), padding=(1, 0), output_padding=(0, 2)), (2, 4, 5)
        ),
        "dilation": Row(back2d(3, 4, 3, dilation=2, padding=1), IMAGE),
        "stride, dilation, output padding": Row(
            back2d(2, 3, 3, stride=3, dilation=2, padding=2, output_padding=2), (2, 4, 3)
        ),
        "groups": Row(back2d(4, 6, 3, groups=2, stride=2, padding=1), (4, 4, 5)),
        "depthwise": Row(back2d(4, 4, 4, groups=4, stride=2, padding=1), (4, 4, 5)),
        "depthwise with multiplier": Row(back2d(3, 6, 3, groups=3, dilation=2), (3, 4, 5)),
        "more padding than kernel": Row(back2d(2, 3, 2, padding=2), (2, 6, 7)),
        "1x1": Row(back2d(3, 5, 1), IMAGE),
        "more output padding than stride": Row(
            back2d(2, 3, 3, dilation=3, output_padding=(2, 1)), (2, 4, 5)
        ),
        "1d": Row(back1d(3, 4, 3), (3, 7)),
        "1d, everything": Row(
            back1d(4, 6, 3, stride=3, padding=2, output_padding=1, dilation=2, groups=2), (4, 7)
        ),
    },
    "linear": {
        "linear": Row(layer(nn.Linear, 5, 3), (5,)),
        "linear no bias": Row(layer(nn.Linear, 5, 3, bias=False), (5,)),
        "linear over a sequence": Row(layer(nn.Linear, 5, 3), (4, 5)),
    },
    "matrix product": {
        "matmul": Row(with_weight((4, 3), torch.matmul), (5, 4)),
        "vector": Row(with_weight((4,), torch.matmul), (5, 4)),
        "of samples": Row(of(lambda x: x @ x.transpose(1, 2)), (5, 4)),
        "bmm": Row(of(lambda x: torch.bmm(x, x.transpose(1, 2).tanh())), (5, 4)),
        "baddbmm": Row(of(lambda x: torch.baddbmm(x, x, x, beta=0.5, alpha=2.0)), (4, 4)),
        "addmm": Row(with_weight((4, 4), lambda x, w: torch.addmm(w[0], x, w)), (4,)),
        "outer": Row(with_weight((4,), lambda x, w: x.unsqueeze(2) * w), (3,)),
        "bilinear": Row(layer(lambda: nn.Sequential(Pair())), (4,)),
        "einsum": Row(with_weight((3, 4, 2), lambda x, w: einsum("nij,jkl->nikl", x, w)), (5, 3)),
        "einsum over two": Row(
            with_weight((5, 3, 2), lambda x, w: einsum("nij,ijk->nk", x, w)), (5, 3)
        ),
        "einsum of samples": Row(of(lambda x: einsum("nid,njd->nij", x, x.sin())), (5, 3)),
    },
    "attention": {
        "plain": Row(of(attend), (2, 5, 4)),
        "causal": Row(of(lambda x: attend(x, is_causal=True)), (2, 5, 4)),
        "mask of booleans": Row(of(lambda x: attend(x, attn_mask=in_order(x))), (2, 5, 4)),
        "mask that bars all keys of a query": Row(
            of(lambda x: attend(x, attn_mask=in_order(x).tril(-1))), (2, 5, 4)
        ),
        "mask that is added": Row(
            with_weight((5, 5), lambda x, w: attend(x, attn_mask=w)), (2, 5, 4)
        ),
        "scale": Row(of(lambda x: attend(x, scale=0.3)), (2, 5, 4)),
        "without heads": Row(of(attend), (1, 5, 4)),
        "grouped queries": Row(
            of(
                lambda x: functional.scaled_dot_product_attention(
                    x, x[:, :2], x[:, 2:] * 2, enable_gqa=True
                )
            ),
            (4, 5, 4),
        ),
        "multi-head": Row(Attention, (5, 8)),
        "multi-head, causal": Row(layer(Attention, causal=True), (5, 8)),
        "multi-head, no bias": Row(layer(Attention, bias=False), (5, 8)),
        "multi-head, weights": Row(WithWeights, (5, 8)),
        "encoder layer": Row(
            encoder(activation="gelu"),
            (5, 8),
            offset=0.1,
        ),
        "encoder layer, norm first": Row(
            encoder(norm_first=True),
            (5, 8),
            offset=0.1,
        ),
        "encoder layer, predicting": Row(
            encoder(activation="gelu"),
            (5, 8),
            offset=0.1,
            training=False,
        ),
    },
    "batch norm": {
        "batch norm 2d": Row(layer(nn.BatchNorm2d, 3), (3, 4, 5)),
        "batch norm 2d, not affine": Row(layer(nn.BatchNorm2d, 3, affine=False), (3, 4, 5)),
        "batch norm 2d, momentum and eps": Row(
            layer(nn.BatchNorm2d, 3, eps=0.1, momentum=0.3), (3, 4, 5)
        ),
        "batch norm 2d, predicting": Row(layer(nn.BatchNorm2d, 3), (3, 4, 5), training=False),
        "batch norm 1d": Row(layer(nn.BatchNorm1d, 6), (6,)),
        "batch norm 1d over time": Row(layer(nn.BatchNorm1d, 6), (6, 5)),
        "batch norm 1d, predicting": Row(layer(nn.BatchNorm1d, 6), (6,), training=False),
    },
    "normalisation": {
        "layer": Row(layer(nn.LayerNorm, 6), (5, 6)),
        "layer over two axes": Row(layer(nn.LayerNorm, (5, 6), eps=0.1), (5, 6)),
        "layer, not affine": Row(layer(nn.LayerNorm, 6, elementwise_affine=False), (6,)),
        "layer, no bias": Row(layer(nn.LayerNorm, 6, bias=False), (6,)),
        "group": Row(layer(nn.GroupNorm, 2, 6), (6, 4, 5)),
        "group, not affine": Row(layer(nn.GroupNorm, 3, 6, affine=False), (6, 4, 5)),
        "group over time": Row(layer(nn.GroupNorm, 3, 6), (6, 5)),
        "group of one channel": Row(layer(nn.GroupNorm, 6, 6), (6, 4, 5)),
        "instance": Row(layer(nn.InstanceNorm2d, 3), (3, 4, 5)),
        "instance, affine": Row(layer(nn.InstanceNorm2d, 3, affine=True), (3, 4, 5)),
        "instance over time": Row(layer(nn.InstanceNorm1d, 3, affine=True), (3, 7)),
        "instance, running statistics": Row(
            layer(nn.InstanceNorm2d, 3, track_running_stats=True), (3, 4, 5)
        ),
        "batch, no running statistics": Row(
            layer(nn.BatchNorm2d, 3, track_running_stats=False), (3, 4, 5)
        ),
        "root mean square": Row(layer(nn.RMSNorm, 6), (5, 6)),
        "root mean square, not affine": Row(
            layer(nn.RMSNorm, (5, 6), elementwise_affine=False, eps=0.1), (5, 6)
        ),
        "local response": Row(layer(nn.LocalResponseNorm, 2), (4, 3, 5)),
        "to unit length": Row(of(lambda x: functional.normalize(x, dim=1)), (5, 4)),
        "weight": Row(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), (4,)),
    },
    "max pooling": {
        "plain": Row(layer(nn.MaxPool2d, 2), (3, 4, 6)),
        "overlapping": Row(layer(nn.MaxPool2d, 3, 2, 1), (3, 7, 8)),
        "stride 1": Row(layer(nn.MaxPool2d, 3, 1, 1), (3, 5, 4)),
        "dilation": Row(layer(nn.MaxPool2d, 2, 1, dilation=2), (3, 6, 5)),
        "ceil mode": Row(layer(nn.MaxPool2d, 3, 2, ceil_mode=True), (3, 6, 8)),
        "uneven": Row(layer(nn.MaxPool2d, (3, 2), (2, 1), (1, 0)), (3, 6, 8)),
        "1d": Row(layer(nn.MaxPool1d, 3, 2, 1), (3, 9)),
        "adaptive": Row(layer(nn.AdaptiveMaxPool2d, 2), (3, 4, 6)),
        "adaptive, windows that overlap": Row(layer(nn.AdaptiveMaxPool2d, (3, 2)), (3, 5, 7)),
        "adaptive to one": Row(layer(nn.AdaptiveMaxPool2d, 1), (3, 5, 7)),
        "adaptive 1d": Row(layer(nn.AdaptiveMaxPool1d, 3), (3, 7)),
    },
    "average pooling": {
        "plain": Row(layer(nn.AvgPool2d, 2), (3, 4, 6)),
        "overlapping": Row(layer(nn.AvgPool2d, 3, 2, 1), (3, 7, 8)),
        "padding not counted": Row(
            layer(nn.AvgPool2d, 3, 2, 1, count_include_pad=False), (3, 7, 8)
        ),
        "ceil mode": Row(layer(nn.AvgPool2d, 3, 2, 1, ceil_mode=True), (3, 6, 8)),
        "ceil mode, padding not counted": Row(
            layer(nn.AvgPool2d, 3, 2, 1, ceil_mode=True, count_include_pad=False), (3, 6, 8)
        ),
        "divisor": Row(layer(nn.AvgPool2d, 2, divisor_override=3), (3, 4, 6)),
        "rest left over": Row(layer(nn.AvgPool2d, 2), (3, 5, 7)),
        "uneven": Row(layer(nn.AvgPool2d, (3, 2), (2, 1), (1, 0)), (3, 6, 8)),
        "1d": Row(layer(nn.AvgPool1d, 3, 2, 1), (3, 9)),
        "3d": Row(layer(nn.AvgPool3d, 2), (2, 4, 5, 6)),
        "3d, overlapping": Row(layer(nn.AvgPool3d, 3, 2, 1), (2, 4, 5, 6)),
        "power": Row(layer(nn.LPPool2d, 2, 2), (3, 4, 6), positive=True),
        "adaptive to one": Row(layer(nn.AdaptiveAvgPool2d, 1), (3, 4, 5)),
        "adaptive": Row(layer(nn.AdaptiveAvgPool2d, 2), (3, 4, 6)),
        "adaptive, windows that overlap": Row(layer(nn.AdaptiveAvgPool2d, (3, 2)), (3, 5, 7)),
        "adaptive, to more": Row(layer(nn.AdaptiveAvgPool2d, (7, 9)), (2, 3, 4)),
        "adaptive 1d": Row(layer(nn.AdaptiveAvgPool1d, 3), (3, 7)),
        "mean over the image": Row(of(lambda x: x.mean((2, 3))), (3, 4, 5)),
    },
    "embedding": {
        "plain": Row(layer(nn.Embedding, 7, 4), (5,), limit=7),
        "one for a sample": Row(layer(nn.Embedding, 7, 4), (), limit=7),
        "padding": Row(layer(nn.Embedding, 7, 4, padding_idx=2), (5,), limit=7),
        "scaled by frequency": Row(
            layer(nn.Embedding, 7, 4, scale_grad_by_freq=True), (5,), limit=7
        ),
        "one-hot": Row(
            with_weight((7, 4), lambda x, w: functional.one_hot(x, 7).to(w) @ w), (5,), limit=7
        ),
        "weights indexed": Row(with_weight((7, 4), lambda x, w: w[x]), (5,), limit=7),
    },
    "activation": {
        name: Row(build, (3, 4, 5))
        for name, build in {
            "relu": nn.ReLU,
            "relu6": nn.ReLU6,
            "leaky relu": layer(nn.LeakyReLU, 0.1),
            # For each channel: one number's gradient may cancel until float32 has few digits left.
            "prelu": layer(nn.PReLU, 3),
            "elu": layer(nn.ELU, 0.7),
            "selu": nn.SELU,
            "celu": layer(nn.CELU, 0.7),
            "gelu": nn.GELU,
            "gelu by tanh": layer(nn.GELU, approximate="tanh"),
            "silu": nn.SiLU,
            "mish": nn.Mish,
            "sigmoid": nn.Sigmoid,
            "hardsigmoid": nn.Hardsigmoid,
            "hardswish": nn.Hardswish,
            "hardtanh": layer(nn.Hardtanh, -0.5, 0.7),
            "hardshrink": nn.Hardshrink,
            "softshrink": nn.Softshrink,
            "tanhshrink": nn.Tanhshrink,
            "threshold": layer(nn.Threshold, 0.1, 0.3),
            "tanh": nn.Tanh,
            "softplus": layer(nn.Softplus, 2.0, 1.0),
            "softsign": nn.Softsign,
            "logsigmoid": nn.LogSigmoid,
            "squared relu": of(lambda x: functional.relu(x).square()),
        }.items()
    }
    | {"glu": Row(nn.GLU, (3, 6))},
    "softmax": {
        "softmax": Row(layer(nn.Softmax, 1), (6,)),
        "softmax over channels": Row(layer(nn.Softmax, 1), (3, 4, 5)),
        "log-softmax": Row(layer(nn.LogSoftmax, 1), (6,)),
        "log-softmax over the last axis": Row(layer(nn.LogSoftmax, -1), (3, 6)),
        "softmin": Row(layer(nn.Softmin, 1), (6,)),
        "logsumexp": Row(of(lambda x: x.logsumexp(1)), (6, 3)),
    },
    "shape": {
        "concat": Row(of(lambda x: torch.cat([x, x.tanh(), x[:, :1]], 1)), (3, 4)),
        "stack": Row(of(lambda x: torch.stack([x, x.tanh()], 2)), (3, 4)),
        "split": Row(of(lambda x: torch.mul(*x.split([2, 2], 1))), (4, 3)),
        "chunk": Row(of(lambda x: torch.mul(*x.chunk(2, 2))), (3, 4)),
        "unbind": Row(of(lambda x: torch.mul(*x.unbind(1))), (2, 4)),
        "tensor_split": Row(of(lambda x: torch.tensor_split(x, 3, 1)[0].sin()), (7, 2)),
        "reshape": Row(of(lambda x: x.reshape(-1, 6, 2).sin()), (3, 4)),
        "view": Row(of(lambda x: x.view(x.shape[0], -1).sin()), (3, 4)),
        "flatten": Row(layer(nn.Flatten), (3, 4)),
        "unflatten": Row(layer(nn.Unflatten, 1, (2, 3)), (6, 4)),
        "permute": Row(of(lambda x: x.permute(0, 2, 3, 1).sin()), (3, 4, 5)),
        "transpose": Row(of(lambda x: x.transpose(1, 2).sin()), (3, 4)),
        "move an axis": Row(of(lambda x: x.movedim(1, 3).sin()), (3, 4, 5)),
        "squeeze and unsqueeze": Row(of(lambda x: x.unsqueeze(1).squeeze(2).sin()), (1, 4)),
        "slice": Row(of(lambda x: x[:, 1:, :3].sin()), (3, 4)),
        "slice with a step": Row(of(lambda x: x[:, ::2, 1::3].sin()), (5, 7)),
        "slice from the end": Row(of(lambda x: x[:, -2:, :-1].sin()), (5, 7)),
        "narrow": Row(of(lambda x: x.narrow(1, 1, 2).sin()), (5, 7)),
        "select": Row(of(lambda x: x[:, 1].sin() + x[:, -1]), (3, 4)),
        "expand": Row(of(lambda x: x.unsqueeze(1).expand(-1, 3, -1).sin()), (4,)),
        "expand a parameter": Row(
            with_weight((1, 1, 4), lambda x, w: torch.cat([w.expand(x.shape[0], -1, -1), x], 1)),
            (3, 4),
        ),
        "repeat": Row(of(lambda x: x.repeat(1, 2, 3).sin()), (3, 4)),
        "repeat each": Row(of(lambda x: x.repeat_interleave(2, 1).sin()), (3, 4)),
        "tile": Row(of(lambda x: x.tile((1, 2, 1)).sin()), (3, 4)),
        "flip": Row(of(lambda x: x.flip(1, 2).sin()), (3, 4)),
        "roll": Row(of(lambda x: x.roll((1, -2), (1, 2)).sin()), (3, 4)),
        "triangle": Row(of(lambda x: x.tril() + 2 * x.triu(1)), (4, 4)),
        "diagonal": Row(of(lambda x: x.diagonal(dim1=1, dim2=2).sin()), (4, 4)),
        "diagonal below": Row(of(lambda x: x.diagonal(-1, 1, 2).sin()), (4, 5)),
        "diagonal above": Row(of(lambda x: x.diagonal(2, 1, 2).sin()), (4, 5)),
        "unfold": Row(of(lambda x: x.unfold(1, 3, 2).sin()), (7, 2)),
        "windows": Row(layer(nn.Unfold, 3, padding=1, stride=2), (2, 5, 6)),
        "windows, back": Row(layer(nn.Fold, (4, 5), 2), (8, 12)),
        "pixel shuffle": Row(layer(nn.PixelShuffle, 2), (8, 3, 4)),
        "pixel unshuffle": Row(layer(nn.PixelUnshuffle, 2), (3, 4, 6)),
        "channel shuffle": Row(layer(nn.ChannelShuffle, 2), (6, 3, 4)),
        "meshgrid": Row(
            of(
                lambda x: (
                    torch.meshgrid(torch.arange(3.0), torch.arange(4.0), indexing="ij")[0].to(x) * x
                )
            ),
            (3, 4),
        ),
    },
    "padding": {
        "constant": Row(layer(nn.ConstantPad2d, (1, 2, 0, 3), 0.5), IMAGE),
        "cut off": Row(of(lambda x: functional.pad(x, (-1, 2)).sin()), IMAGE),
        "zeros": Row(layer(nn.ZeroPad2d, 2), IMAGE),
        "reflect": Row(layer(nn.ReflectionPad2d, (1, 2, 3, 0)), IMAGE),
        "reflect, 1d": Row(layer(nn.ReflectionPad1d, (1, 2)), (3, 6)),
        "replicate": Row(layer(nn.ReplicationPad2d, (1, 2, 3, 0)), IMAGE),
        "replicate, 1d": Row(layer(nn.ReplicationPad1d, (3, 2)), (3, 6)),
        "circular": Row(layer(nn.CircularPad2d, (1, 2, 3, 0)), IMAGE),
        "convolution that reflects": Row(conv2d(3, 4, 3, padding=1, padding_mode="reflect"), IMAGE),
        "convolution around the edge": Row(
            conv1d(3, 4, 3, padding=1, padding_mode="circular"), (3, 6)
        ),
    },
    "indexing": {
        "index with a constant": Row(of(lambda x: x[:, PICK].sin()), (3, 4)),
        "index select": Row(of(lambda x: x.index_select(1, PICK).sin()), (3, 4)),
        "index with two constants": Row(of(lambda x: x[:, PICK, PICK + 1].sin()), (3, 4)),
        "index a parameter": Row(
            with_weight((4, 2), lambda x, w: x.unsqueeze(2) * w[PLACES[0]]), (3,)
        ),
        "table of biases": Row(
            with_weight((4, 2), lambda x, w: x.unsqueeze(3) * w[PLACES]), (2, 3)
        ),
        "gather": Row(of(lambda x: x.gather(1, PLACES.expand(x.shape[0], -1, -1)).sin()), (4, 3)),
        "gather where the data say": Row(of(lambda x: x.gather(1, x.argsort(1)).sin()), (6,)),
        "masked": Row(of(lambda x: x.masked_fill(x > 0.5, 0.0).sin()), (3, 4)),
        "where": Row(of(lambda x: torch.where(x > 0, x * x, x.sin())), (3, 4)),
        "where with a constant mask": Row(of(lambda x: torch.where(PICK > 0, x, 0.0)), (4, 3)),
        "topk": Row(of(lambda x: x.topk(2, 1).values.sin()), (5, 3)),
        "sort": Row(of(lambda x: x.sort(1).values * torch.arange(6.0).to(x)), (6,)),
        "scatter": Row(
            of(
                lambda x: torch.zeros_like(x).scatter_add(
                    1, PLACES.expand(x.shape[0], -1, -1), x[:, :2]
                )
            ),
            (4, 3),
        ),
    },
    "reduction": elementwise(
        mean=lambda x: x.mean(1),
        mean_of_all=lambda x: x.mean((1, 2)),
        mean_kept=lambda x: x - x.mean(1, keepdim=True),
        sum=lambda x: x.sum(2).sin(),
        sum_over_the_batch=lambda x: x * x.sum(0),
        max=lambda x: x.max(1).values,
        min=lambda x: x.min(1).values,
        amax=lambda x: x.amax((1, 2)),
        amin=lambda x: x.amin(1),
        var=lambda x: x.var(1),
        var_biased=lambda x: x.var((1, 2), unbiased=False),
        std=lambda x: x.std(2),
        var_mean=lambda x: torch.mul(*torch.var_mean(x, 1)),
        norm=lambda x: x.norm(dim=1),
        norm_of_order_1=lambda x: x.norm(1, 1),
        cumsum=lambda x: x.cumsum(1),
    ),
    "arithmetic": elementwise(
        add=lambda x: x + 2 * x.sin(),
        subtract=lambda x: 1 - x,
        multiply=lambda x: x * x.sin(),
        divide=lambda x: x / (2 + x * x),
        reciprocal=lambda x: (2 + x * x).reciprocal(),
        square=lambda x: x**2,
        cube=lambda x: x**3,
        negative_power=lambda x: (1 + x * x) ** -1.5,
        power_of_samples=lambda x: 2.0**x,
        power_of_both=lambda x: (1 + x * x) ** x,
        exp=lambda x: x.exp(),
        expm1=lambda x: x.expm1(),
        exp2=lambda x: x.exp2(),
        log=lambda x: (1 + x * x).log(),
        log1p=lambda x: (x * x).log1p(),
        log2=lambda x: (1 + x * x).log2(),
        sqrt=lambda x: (1 + x * x).sqrt(),
        rsqrt=lambda x: (1 + x * x).rsqrt(),
        abs=lambda x: x.abs(),
        sign=lambda x: x * x.sign(),
        sin_cos=lambda x: x.sin() * x.cos(),
        tan=lambda x: x.tan(),
        atan=lambda x: x.atan(),
        atan2=lambda x: torch.atan2(x, 2 + x.sin()),
        sinh_cosh=lambda x: x.sinh() * x.cosh(),
        asinh=lambda x: x.asinh(),
        erf=lambda x: x.erf(),
        clamp=lambda x: x.clamp(-0.5, 0.7).sin(),
        clamp_below=lambda x: x.clamp(min=0.1).sin(),
        maximum=lambda x: torch.maximum(x, x.sin() * 2),
        minimum=lambda x: torch.minimum(x, x * x),
        floor_and_remainder=lambda x: x - x.floor() + x.remainder(0.7),
        round=lambda x: x * x.round(),
        lerp=lambda x: torch.lerp(x, x.sin(), 0.3),
        addcmul=lambda x: torch.addcmul(x, x, x.sin(), value=0.5),
        logaddexp=lambda x: torch.logaddexp(x, x.sin()),
        hypot=lambda x: torch.hypot(x, 1 + x * x),
    ),
    "residual": {
        "identity": Row(
            lambda: Residual(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.GELU())), IMAGE
        ),
        "shortcut": Row(lambda: Residual(nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(3, 4, 1, 2)), IMAGE),
        "skip by concatenation": Row(
            with_weight((4, 4), lambda x, w: torch.cat([x, (x @ w).tanh()], 1)), (4,)
        ),
        "gate": Row(
            with_weight((4, 4), lambda x, w: x * torch.sigmoid(x.mean(2) @ w).unsqueeze(2)), (4, 5)
        ),
    },
    "interpolation": {
        "nearest": Row(layer(nn.Upsample, scale_factor=2), IMAGE),
        "nearest, size": Row(layer(nn.Upsample, (9, 5)), IMAGE),
        "nearest, fraction": Row(layer(nn.Upsample, scale_factor=1.7), IMAGE),
        "nearest, smaller": Row(layer(nn.Upsample, scale_factor=0.5), IMAGE),
        "nearest-exact": Row(layer(nn.Upsample, (9, 5), mode="nearest-exact"), IMAGE),
        "nearest, 1d": Row(layer(nn.Upsample, scale_factor=3), (3, 5)),
        "bilinear": Row(layer(nn.Upsample, scale_factor=2, mode="bilinear"), IMAGE),
        "bilinear, size": Row(layer(nn.Upsample, (9, 5), mode="bilinear"), IMAGE),
        "bilinear, fraction": Row(layer(nn.Upsample, scale_factor=1.7, mode="bilinear"), IMAGE),
        "bilinear, aligned corners": Row(
            layer(nn.Upsample, scale_factor=2, mode="bilinear", align_corners=True), IMAGE
        ),
        "bilinear, size, aligned corners": Row(
            layer(nn.Upsample, (9, 5), mode="bilinear", align_corners=True), IMAGE
        ),
        "linear": Row(layer(nn.Upsample, scale_factor=2, mode="linear"), (3, 5)),
        "bicubic": Row(layer(nn.Upsample, scale_factor=2, mode="bicubic"), IMAGE),
        "area": Row(of(lambda x: functional.interpolate(x, (3, 4), mode="area")), IMAGE),
    },
}


class Pair(nn.Module):
    """A bilinear layer of samples and their sines."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x, x.sin())
        return output
