"""Models as users write them, without any preparation for splitting.

Smooth activations, so that exact comparisons meet no kinks. Each maps (N, *shape) to (N, 5), or to
five classes for each position of a sequence (N, t, 5) or of an image (N, 5, h, w).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn

CLASSES = 5


class Separable(nn.Module):
    """Depthwise 3 x 3 then 1 x 1, as MobileNet stacks them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False)
        self.norm1 = nn.BatchNorm2d(inputs)
        self.pointwise = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm1(self.depthwise(x)))
        return F.silu(self.norm2(self.pointwise(x)))


class DepthwiseSeparable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, CLASSES)  # registered first, used last
        self.stem = nn.Conv2d(3, 8, 3, 2, 1, bias=False)
        self.body = nn.ModuleList([Separable(8, 12, 1), Separable(12, 12, 2)])
        self.grouped = nn.Conv2d(12, 12, 3, padding="same", dilation=2, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.body:
            x = block(x)
        return self.head(torch.tanh(self.grouped(x)).mean((2, 3)))


class UNet(nn.Module):
    """Two levels with skips from the encoder to the decoder by concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(2, 6, 3, padding=1, padding_mode="reflect")
        self.down2 = nn.Conv2d(6, 8, 3, padding=1)
        self.bottom = nn.Conv2d(8, 8, 3, padding=1)
        self.up2 = nn.ConvTranspose2d(8, 8, 2, 2)
        self.merge2 = nn.Conv2d(16, 6, 3, padding=1)
        self.merge1 = nn.Conv2d(12, 6, 3, padding=1)
        self.classify = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.down1(x))
        second = torch.tanh(self.down2(F.avg_pool2d(first, 2)))
        low = torch.tanh(self.bottom(F.avg_pool2d(second, 2)))
        up = torch.tanh(self.merge2(torch.cat([self.up2(low), second], 1)))
        up = F.interpolate(up, scale_factor=2, mode="nearest")
        out = torch.tanh(self.merge1(torch.cat([up, first], 1)))
        return self.classify(out.mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, e = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, e // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(n, t, e))


class Encoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, 2)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.shrink = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.shrink(F.gelu(self.expand(self.norm2(x))))


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 12, 4, 4)
        self.position = nn.Parameter(torch.randn(1, 4, 12) * 0.1)
        self.encoders = nn.Sequential(Encoder(12), Encoder(12))
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.encoders(tokens)).mean(1))


class StockTransformer(nn.Module):
    """PyTorch's encoder layers, which read the weights of the layers inside them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Linear(6, 12)
        layer = nn.TransformerEncoderLayer(
            12, 2, 16, dropout=0.0, activation=F.gelu, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(torch.tanh(self.tokens(x))).mean(1))


class Signal(nn.Module):
    """1-D convolutions with stride, dilation and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(2, 8, 5, 2, 2),
            nn.BatchNorm1d(8),
            nn.Tanh(),
            nn.Conv1d(8, 10, 3, padding=2, dilation=2),
            nn.Tanh(),
            nn.Conv1d(10, 10, 3, padding=1),
            nn.Sigmoid(),
        )
        self.head = nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean(2))


class Recurrent(nn.Module):
    """An LSTM over a sequence of vectors, a hidden layer and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, batch_first=True, bidirectional=True)
        self.hidden = nn.Linear(16, 10)
        self.head = nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.lstm(x)
        return self.head(torch.tanh(self.hidden(out[:, -1])))


class Tagger(nn.Module):
    """An encoder layer over a sequence of vectors, and classes for each step."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Linear(6, 8)
        self.encoder = Encoder(8)
        self.bend = nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.bend(self.encoder(self.tokens(x)))))


class Segmentation(nn.Module):
    """Convolutions with a stride, an upsampling and classes for each point of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(2, 8, 3, 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.body = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        deep = torch.tanh(self.body(torch.tanh(self.norm(self.down(x)))))
        return F.interpolate(self.head(deep), size=x.shape[2:], mode="bilinear")


class CalledTwice(nn.Module):
    """One module used twice: its weight is shared although there is only one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 8, 3, padding=1)
        self.again = nn.Conv2d(8, 8, 3, padding=1)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.again(torch.tanh(self.stem(x))))
        x = torch.tanh(self.again(torch.tanh(self.middle(x))))
        return self.head(x.mean((2, 3)))


class Tied(nn.Module):
    """Two layers with one weight, which is also used transposed, and layers with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 12)
        self.first = nn.Linear(12, 8, bias=False)
        self.second = nn.Linear(12, 8, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(8)
        self.same_norm = self.norm
        self.hidden = nn.Linear(8, 8)
        self.same_hidden = self.hidden
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(torch.tanh(self.stem(x)))))
        x = self.same_norm(self.second(torch.tanh(x @ self.first.weight)))
        return self.head(torch.tanh(self.same_hidden(torch.tanh(self.hidden(x)))))


@dataclass(frozen=True)
class Foreign:
    """How to build a model, and the shapes of one sample and of its labels."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    labels: tuple[int, ...] = ()


class Conv1D(nn.Module):
    """The layer that GPT-2 has for linear ones: x @ weight + bias."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self.weight.shape[1])
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(shape)


Conv1D.__module__ = "transformers.pytorch_utils"


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spread, self.mix, self.gather = Conv1D(12, 8), Conv1D(10, 12), Conv1D(8, 10)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gather(torch.tanh(self.mix(F.gelu(self.spread(x)))))
        return self.head(x.mean(1))


FOREIGN = {
    "separable": Foreign(DepthwiseSeparable, (3, 10, 10)),
    "unet": Foreign(UNet, (2, 8, 8)),
    "transformer": Foreign(VisionTransformer, (3, 8, 8)),
    "stock-transformer": Foreign(StockTransformer, (5, 6)),
    "signal": Foreign(Signal, (2, 16)),
    "recurrent": Foreign(Recurrent, (7, 6)),
    "called-twice": Foreign(CalledTwice, (2, 6, 6)),
    "tagger": Foreign(Tagger, (4, 6), (4,)),
    "segmentation": Foreign(Segmentation, (2, 6, 4), (6, 4)),
    "tied": Foreign(Tied, (6,)),
    "products": Foreign(Products, (4, 8)),
}
