"""Test rows of operators that are functions of the samples alone."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from layer_cases import Row
from row_kinds import (
    IMAGE,
    PICK,
    PLACES,
    Residual,
    conv1d,
    conv2d,
    elementwise,
    layer,
    of,
    with_weight,
)


def activated(x: Tensor) -> Tensor:
    y = functional.relu_(functional.silu(x.sin(), inplace=True).mul_(2))
    return functional.elu(-y, 0.5, inplace=True)


def sampled(x: Tensor, align_corners: bool = False, **options: str) -> Tensor:
    """Images, sampled at points inside and outside that they give themselves."""
    grid = x.permute(0, 2, 3, 1)
    return functional.grid_sample(x.sin(), grid, align_corners=align_corners, **options)


def turned(x: Tensor, align_corners: bool = False) -> Tensor:
    """Images, turned by their own means."""
    theta = x.flatten(2)[:, :, :3]
    grid = functional.affine_grid(theta, [x.shape[0], 2, 3, 4], align_corners=align_corners)
    return functional.grid_sample(x, grid, align_corners=align_corners)


def overwritten(x: Tensor) -> Tensor:
    y = x.sin()
    y[:, 1] = 0
    y[:, :, 1:3] *= x[:, :, :2]
    return y


def overwritten_through_views(x: Tensor) -> Tensor:
    y = x.cos()
    turned = y.transpose(1, 2)
    turned[:, -1] = x[:, :, 0].sin()
    flat = y.view(-1, 12)
    flat[:, 3:5].add_(0.5)
    return y.sigmoid() + turned.transpose(1, 2)


def written_diagonal(x: Tensor) -> Tensor:
    y = x.sin()
    y.diagonal(0, 1, 2).add_(-1).pow_(2)
    torch.diagonal(y, 1, 2, 1).mul_(3)
    return y


def reduced_blocks(x: Tensor) -> Tensor:
    """Reductions of seven axes; XNNPACK reduces six."""
    y = x.sin().reshape(-1, 3, 1, 2, 1, 1, 2)
    total, mean = y.sum((1, 6), keepdim=True), y.mean(3, keepdim=True)
    return total * mean - y.amax((2, 6), keepdim=True) + y.sum((2, 4), keepdim=True)


def between_samples(x: Tensor) -> Tensor:
    """Attention of the samples of a batch to each other: two sizes are the batch's."""
    flat = x.flatten(1)
    scores = (flat @ flat.t()).view(1, x.shape[0], 1, x.shape[0]).softmax(-1)
    return scores.view(x.shape[0], x.shape[0]) @ flat


def overwritten_batch(x: Tensor) -> Tensor:
    """A loop over parts of the batch that has one part."""
    y, n = x.sin(), x.shape[0]
    for part in range(1):
        y[part * n : (part + 1) * n] += x[part * n : (part + 1) * n].cos()
    return y


def summed(x: Tensor) -> Tensor:
    y = x * 3
    y += x.sin()
    return y.mul_(y.detach().sigmoid())


def scattered(x: Tensor, reduce: str, kept: bool) -> Tensor:
    """What is written to some rows, where both index lists and values depend on the position."""
    index = PLACES.expand(x.shape[0], -1, -1)
    return x.cos().scatter_reduce(1, index, x[:, :2].sin(), reduce, include_self=kept)


STACKED = torch.tensor([1.0, 2.0, -1.5]).reshape(3, 1, 1, 1)

FUNCTIONS: dict[str, dict[str, Row]] = {
    "activation": {
        name: Row(build, (3, 4, 5))
        for name, build in {
            "relu": nn.ReLU,
            "relu6": nn.ReLU6,
            "leaky relu": layer(nn.LeakyReLU, 0.1),
            # One slope per channel: the gradient of a single one may cancel to a few digits.
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
        "between samples": Row(of(between_samples), (3, 4)),
        "concat": Row(of(lambda x: torch.cat([x, x.tanh(), x[:, :1]], 1)), (3, 4)),
        "stack, samples second": Row(
            of(lambda x: (torch.stack([x, x.tanh(), x.cos()]) * STACKED).sum(0)), (3, 4)
        ),
        "stack": Row(of(lambda x: torch.stack([x, x.tanh()], 2)), (3, 4)),
        "split": Row(of(lambda x: torch.mul(*x.split([2, 2], 1))), (4, 3)),
        "chunk": Row(of(lambda x: torch.mul(*x.chunk(2, 2))), (3, 4)),
        "halves of a doubled batch": Row(
            of(lambda x: torch.mul(*torch.cat([x, x.tanh()]).split(x.shape[0]))), (3, 4)
        ),
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
        "diagonal written": Row(of(written_diagonal), (4, 5)),
        "diagonal below": Row(of(lambda x: x.diagonal(-1, 1, 2).sin()), (4, 5)),
        "diagonal above": Row(of(lambda x: x.diagonal(2, 1, 2).sin()), (4, 5)),
        "unfold": Row(of(lambda x: x.unfold(1, 3, 2).sin()), (7, 2)),
        "unfold the last axis": Row(
            of(lambda x: x.permute(0, 2, 1).unfold(-1, 4, 2).sin().flatten(1)), (8, 6)
        ),
        "identity": Row(of(lambda x: (x @ torch.eye(4).to(x)).sin()), (3, 4)),
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
        "numbers of samples and their count": Row(
            of(lambda x: ((torch.arange(x.shape[0]) + x.shape[0]) % 3)[:, None] * x.sin()), (3,)
        ),
        "infinite quotients": Row(of(lambda x: torch.isinf(1 / x.relu()) * x.sin()), (3, 4)),
        "where with a constant mask": Row(of(lambda x: torch.where(PICK > 0, x, 0.0)), (4, 3)),
        "topk": Row(of(lambda x: x.topk(2, 1).values.sin()), (5, 3)),
        "sort": Row(of(lambda x: x.sort(1).values * torch.arange(6.0).to(x)), (6,)),
        "scatter over other values": Row(
            of(lambda x: x.sin().scatter(1, x.argsort(1)[:, :2], x[:, 1:3].exp())), (6,)
        ),
        "scatter": Row(
            of(
                lambda x: torch.zeros_like(x).scatter_add(
                    1, PLACES.expand(x.shape[0], -1, -1), x[:, :2]
                )
            ),
            (4, 3),
        ),
        "vector parameter": Row(
            with_weight((4,), lambda x, w: x * w[PLACES[0]].sin() + w.permute(0)[0]), (3,)
        ),
        **{
            f"scatter {reduce}, {'with' if kept else 'without'} the old value": Row(
                of(partial(scattered, reduce=reduce, kept=kept)), (4, 3)
            )
            for reduce in ("sum", "mean")
            for kept in (True, False)
        },
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
        max_of_all=lambda x: x * x.max(),
        min_of_all=lambda x: x * x.min(),
        amax_of_all=lambda x: x * x.amax(),
        amin_of_all=lambda x: x * x.amin(),
        var=lambda x: x.var(1),
        var_biased=lambda x: x.var((1, 2), unbiased=False),
        std=lambda x: x.std(2),
        std_over_the_batch=lambda x: x / (x.std(0) + 0.1),
        var_mean=lambda x: torch.mul(*torch.var_mean(x, 1)),
        norm=lambda x: x.norm(dim=1),
        norm_of_order_1=lambda x: x.norm(1, 1),
        cumsum=lambda x: x.cumsum(1),
        product=lambda x: x.prod(1),
        seven_axes=reduced_blocks,
        product_of_an_odd_number=lambda x: x[:, 1:].prod(1, keepdim=True) * x.prod(-1)[..., None],
        cumulative_product=lambda x: x.cumprod(2),
        median=lambda x: x.median(1).values,
        kth_value=lambda x: x.kthvalue(2, dim=1, keepdim=True).values.sin(),
        distances=lambda x: torch.cdist(x, x.sin()),
        distances_of_order_1=lambda x: torch.cdist(x, x.sin(), p=1),
        quantile=lambda x: x.quantile(0.3, 1).sin(),
        nanmean=lambda x: x.nanmean(1).sin(),
        cumsum_of_booleans=lambda x: x * (x > 0).cumsum(1),
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
        quotient_of_integers=lambda x: x * (100 ** (torch.arange(x.shape[-1]) / 7)).sin(),
        integers_with_a_fraction=lambda x: x * (torch.arange(x.shape[-1]) * 0.3 + 0.5).cos(),
        exp=lambda x: x.exp(),
        expm1=lambda x: x.expm1(),
        exp2=lambda x: x.exp2(),
        log=lambda x: (1 + x * x).log(),
        log1p=lambda x: (x * x).log1p(),
        log2=lambda x: (1 + x * x).log2(),
        log10=lambda x: (1 + x * x).log10(),
        sqrt=lambda x: (1 + x * x).sqrt(),
        rsqrt=lambda x: (1 + x * x).rsqrt(),
        abs=lambda x: x.abs(),
        abs_of_integers=lambda x: x * ((x > 0).cumsum(1) - 2).abs(),
        sign=lambda x: x * x.sign(),
        sign_of_integers=lambda x: x * ((x > 0).cumsum(1) - 2).sign(),
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
    "Fourier transform": elementwise(
        magnitude=lambda x: torch.fft.rfft(x, norm="ortho")[..., 1:].abs(),
        phase=lambda x: torch.fft.rfft(x)[..., 1:2].angle(),
        filtered=lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * (1 - 2j), x.size(1), 1),
        mixed=lambda x: torch.fft.fftn(x, dim=(1, 2)).real,
        back=lambda x: torch.fft.ifft(torch.fft.fft(x) * torch.complex(x, x.cos())).imag,
        spectrogram=lambda x: torch.stft(
            x.flatten(1), 4, 2, window=torch.hann_window(4).to(x), return_complex=True
        ).abs(),
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
    "grid sampling": {
        "bilinear": Row(of(partial(sampled, mode="bilinear")), (2, 4, 5)),
        "aligned corners": Row(of(partial(sampled, align_corners=True)), (2, 4, 5)),
        "nearest": Row(of(partial(sampled, mode="nearest")), (2, 4, 5)),
        "border": Row(of(partial(sampled, padding_mode="border")), (2, 4, 5)),
        "affine": Row(of(turned), (2, 4, 5)),
        "affine, aligned corners": Row(of(partial(turned, align_corners=True)), (2, 4, 5)),
    },
    "writes in place": {
        "activations": Row(of(activated), (3, 4)),
        "a row and a slice": Row(of(overwritten), (3, 4)),
        "through views": Row(of(overwritten_through_views), (3, 4)),
        "residual": Row(of(summed), (3, 4)),
        "all samples": Row(of(overwritten_batch), (3, 4)),
    },
}
