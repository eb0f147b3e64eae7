"""Models with the width of every layer as an argument, so that a test can build narrow ones."""

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn


class Plain(nn.Module):
    """Convolutions, pooling, flatten, two linear layers."""

    def __init__(self, a: int, b: int, hidden: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, a, 3, padding=1)
        self.bn = nn.BatchNorm2d(a)
        self.conv2 = nn.Conv2d(a, b, (3, 2), (2, 1), bias=False)
        self.hidden = nn.Linear(b * 2 * 4, hidden)
        self.classifier = nn.Linear(hidden, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu_(self.bn(self.conv1(x))), 2)
        x = F.adaptive_avg_pool2d(F.hardswish(self.conv2(x)), (2, 4)).flatten(1)
        return self.classifier(F.silu(self.hidden(x)))


class Residual(nn.Module):
    """A stem, a block with an identity shortcut, and a block with a projection."""

    def __init__(self, a: int, inner: int, b: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, a, 3, padding="same")
        self.down1 = nn.Conv2d(a, inner, 1)
        self.up1 = nn.Conv2d(inner, a, 3, padding=1)
        self.branch = nn.Sequential(nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b))
        self.projection = nn.Conv2d(a, b, 1, 2)
        self.act = nn.PReLU(b)
        self.classifier = nn.Linear(b, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        x = x + self.up1(torch.sigmoid(self.down1(x)))
        x = self.act(self.branch(x) + self.projection(x))
        return self.classifier(x.mean((2, 3)))


class Separable(nn.Module):
    """Depthwise convolutions, one with two outputs per channel, and a squeeze-excitation gate."""

    def __init__(self, a: int, b: int, squeezed: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, a, 3)
        self.depth1 = nn.Conv2d(a, a, 3, padding=1, groups=a)
        self.point = nn.Conv2d(a, b, 1)
        self.depth2 = nn.Conv2d(b, 2 * b, 3, groups=b, bias=False)
        self.bn = nn.BatchNorm2d(2 * b)
        self.squeeze = nn.Conv2d(2 * b, squeezed, 1)
        self.excite = nn.Conv2d(squeezed, 2 * b, 1)
        self.classifier = nn.Linear(2 * b, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.point(self.depth1(self.stem(x))))
        x = self.bn(self.depth2(x))
        gate = self.excite(F.relu(self.squeeze(x.mean((-2, -1), keepdim=True))))
        return self.classifier(torch.amax(x * torch.sigmoid(gate), (2, 3)))


class Concatenating(nn.Module):
    """A small U-Net: the decoder concatenates its values with the encoder's and the input."""

    def __init__(self, a: int, b: int, up: int, out: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(2, a, 3, padding=1)
        self.deep = nn.Conv2d(a, b, 3, 2, 1)
        self.up = nn.ConvTranspose2d(b, up, 2, 2)
        self.smooth = nn.ConvTranspose2d(b, b, 2, 2, groups=b)
        self.join = nn.Conv2d(a + up + b + 2, out, 3, padding=1)
        # Added to the concatenation, so its outputs are counted in the same four pieces.
        self.beside = nn.Conv2d(out, a + up + b + 2, 1)
        self.bn = nn.BatchNorm2d(a + up + b + 2)
        self.classifier = nn.Linear(a + up + b + 2, 4)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.elu(self.down(x))
        deep = F.leaky_relu(self.deep(skip))
        grown = F.interpolate(deep, scale_factor=2) * self.smooth(deep)
        both = torch.cat([skip, self.up(deep), grown, x], 1)
        both = self.bn(both + self.beside(torch.tanh(self.join(both))))
        return self.classifier(F.adaptive_max_pool2d(both, 1)[:, :, 0, 0])


class Signal(nn.Module):
    """1-D convolutions, group and instance norm, flattened with the channels last."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(2, a, 3, padding=1)
        self.groups = nn.GroupNorm(2, a)
        self.conv2 = nn.Conv1d(a, b, 3, dilation=2)
        self.instance = nn.GroupNorm(b, b)
        self.norm = nn.LayerNorm(b)
        self.classifier = nn.Linear(5 * b, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool1d(torch.tanh(self.groups(self.conv1(x))), 2)
        x = self.norm(self.instance(self.conv2(x)).transpose(1, 2))
        return self.classifier(x.reshape(x.shape[0], -1))


class Recurrent(nn.Module):
    """A stacked bidirectional LSTM, a GRU, and the last states of both."""

    def __init__(self, width: int, hidden: int, gated: int) -> None:
        super().__init__()
        self.embed = nn.Linear(3, width)
        self.lstm = nn.LSTM(width, hidden, 2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(2 * hidden, gated, batch_first=True, bias=False)
        self.classifier = nn.Linear(2 * hidden + gated, 4)

    def forward(self, x: Tensor) -> Tensor:
        first = x.new_zeros(4, x.shape[0], self.lstm.hidden_size)
        out, (last, _) = self.lstm(torch.tanh(self.embed(x)), (first, torch.ones_like(first)))
        gated = self.gru(out, x.new_zeros(1, x.shape[0], self.gru.hidden_size))[0][:, -1]
        return self.classifier(torch.cat([last[0], last[3], gated], 1))


class Mixer(nn.Module):
    """Patches as tokens, a class token, positions, and layers that mix tokens and channels."""

    def __init__(self, width: int, tokens: int, hidden: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(5, width))
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Sequential(nn.Linear(5, tokens), nn.GELU(), nn.Linear(tokens, 5))
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.scale = nn.Parameter(torch.ones(width))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).permute(0, 2, 1)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions.unsqueeze(0)
        x = x + self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.mlp(x) * self.scale.view(1, 1, -1)
        return self.head(x[:, 0])


class Gated(nn.Module):
    """Halves of the channels of one layer: one gates the other, or both are used separately.

    The second shortcut has no weights: its channels are padded with zeros on both sides.
    """

    def __init__(self, a: int, b: int, margin: int) -> None:
        super().__init__()
        self.gated = nn.Conv2d(2, 2 * a, 3, padding=1)
        self.halves = nn.Conv2d(a, 2 * b, 1)
        self.left = nn.Conv2d(b, b, 3, padding=1)
        self.wide = nn.Conv2d(2 * b, 2 * b + 2 * margin, 3, 2, 1)
        self.margin = margin
        self.classifier = nn.Linear(2 * b + 2 * margin, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.halves(F.glu(self.gated(x), 1))
        left, right = x.chunk(2, 1)
        x = torch.cat([right, self.left(left)], 1)
        m = self.margin
        x = F.relu(self.wide(x) + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, m, m)))
        return self.classifier(x.mean((2, 3)))


class Packed(nn.Module):
    """A layer of a vision transformer: one product for queries, keys and values of all heads."""

    def __init__(self, width: int, heads: int, hidden: int, size: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * heads * size)
        self.heads, self.size = heads, size
        self.proj = nn.Linear(heads * size, width)
        self.wide, self.narrow = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        n, t, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.narrow(F.gelu(self.wide(x)))
        return self.head(x[:, 0])


class Shared(nn.Module):
    """Attention whose queries share keys and values, with rotated halves and a bias by head."""

    distance: Tensor

    def __init__(self, width: int, groups: int, size: int = 4, times: int = 2) -> None:
        super().__init__()
        heads = groups * times
        self.first = nn.Linear(2, width)
        self.q = nn.Linear(width, heads * size, bias=False)
        self.k = nn.Linear(width, groups * size, bias=False)
        self.v = nn.Linear(width, groups * size, bias=False)
        self.bias = nn.Parameter(torch.zeros(5, heads))
        self.register_buffer("distance", torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3]))
        self.size, self.times = size, times
        self.out = nn.Parameter(torch.zeros(heads * size, width))
        self.head = nn.Linear(width, 4)

    def split_heads(self, x: Tensor) -> Tensor:
        x = x.view(*x.shape[:2], -1, self.size).transpose(1, 2)
        half = self.size // 2
        return torch.cat((-x[..., half:], x[..., :half]), -1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        n, t, _ = x.shape
        q, k, v = (self.split_heads(layer(x)) for layer in (self.q, self.k, self.v))
        k = k[:, :, None].expand(-1, -1, self.times, -1, -1).reshape(n, -1, t, self.size)
        v = v.repeat_interleave(self.times, 1)
        bias = self.bias[self.distance.view(3, 3)].permute(2, 0, 1)
        weights = (q @ k.transpose(2, 3) / self.size**0.5 + bias[None]).softmax(-1)
        heads = torch.matmul(weights, v).transpose(1, 2).contiguous().reshape(n * t, -1)
        x = x + torch.mm(heads, self.out).view(n, t, -1)
        return self.head(x.mean(1))


class Shuffled(nn.Module):
    """Convolutions in groups, a shuffle of their channels, and half of the channels passed by."""

    def __init__(self, group: int, out: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(2, 2 * group, 1)
        self.grouped = nn.Conv1d(2 * group, 2 * out, 3, padding=1, groups=2)
        self.norm = nn.BatchNorm1d(2 * out)
        self.right = nn.Conv1d(out, out, 1)
        self.classifier = nn.Linear(2 * out, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.grouped(torch.tanh(self.first(x))))
        n, c, t = x.shape
        x = x.view(n, 2, c // 2, t).transpose(1, 2).reshape(n, c, t)
        x = torch.cat([x[:, : c // 2], self.right(x[:, c // 2 :])], 1)
        return self.classifier(x.mean(2))


class Encoder(nn.Module):
    """PyTorch's own transformer layer, whose attention flattens batch and heads."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.layer = nn.TransformerEncoderLayer(
            width, heads, hidden, dropout=0.0, activation="gelu", batch_first=True
        )
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.first(x)).amax(1))
