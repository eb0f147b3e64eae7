"""Small models for tests. All are `nn.Sequential`, so that an oracle can cut them by child index.

The smooth ones have no kinks: two correct float32 implementations then agree to rounding.
"""

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn

INPUT_SHAPE = (2, 6, 6)
CLASSES = 4


class Residual(nn.Module):
    """tanh(batch norm(3 x 3 convolution) + 1 x 1 shortcut), both with a stride."""

    def __init__(self, inputs: int, outputs: int, stride: int = 2) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.bn(self.conv(x)) + self.shortcut(x))


def smooth_cnn(first: int = 6, second: int = 8, third: int = 8, fourth: int = 12) -> nn.Sequential:
    """Convolutions with and without batch norm, a residual block and a linear hidden layer."""
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(2, first, 3, padding=1, bias=False),
            bn=nn.BatchNorm2d(first),
            act=nn.GELU(),
            strided=nn.Conv2d(first, second, (3, 2), (2, 1), (1, 0)),
            squash=nn.Sigmoid(),
            residual=Residual(second, third),
            pool=nn.AdaptiveAvgPool2d(1),
            flat=nn.Flatten(),
            hidden=nn.Linear(third, fourth),
            bend=nn.Tanh(),
            classifier=nn.Linear(fourth, CLASSES),
        )
    )


def linear() -> nn.Sequential:
    """Its loss is convex, so a reversed change that is large enough always raises it."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(INPUT_SHAPE), CLASSES))


def wide_cnn() -> nn.Sequential:
    """As many channels as convolutions by Winograd's method need."""
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(2, 32, 3, padding=1, bias=False),
            bn=nn.BatchNorm2d(32),
            act=nn.GELU(),
            second=nn.Conv2d(32, 32, 3, padding=1),
            bend=nn.Tanh(),
            residual=Residual(32, 32),
            pool=nn.AdaptiveAvgPool2d(1),
            flat=nn.Flatten(),
            classifier=nn.Linear(32, CLASSES),
        )
    )


def wide_layers() -> nn.Sequential:
    """The least model with blocked forms and convolutions by Winograd's method."""
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(2, 32, 3, padding=1, bias=False),
            bn=nn.BatchNorm2d(32),
            act=nn.GELU(),
            second=nn.Conv2d(32, 32, 3, padding=1),
            bend=nn.Tanh(),
            pool=nn.AdaptiveAvgPool2d(1),
            flat=nn.Flatten(),
            classifier=nn.Linear(32, CLASSES),
        )
    )


def four_columns() -> nn.Sequential:
    """(N, 4) -> (N, 2)."""
    return nn.Sequential(nn.Linear(4, 2))


def staged_cnn(first: int = 2, second: int = 3) -> nn.Sequential:
    """Two stages of residual blocks in one `nn.Sequential`; a stage may have fewer blocks."""
    names = [*("a", "b")[:first], *("c", "d", "e")[:second]]
    sizes = {"a": (4, 4, 1), "b": (4, 4, 1), "c": (4, 6, 2), "d": (6, 6, 1), "e": (6, 6, 1)}
    return nn.Sequential(
        OrderedDict(
            stem=nn.Conv2d(2, 4, 3, padding=1),
            blocks=nn.Sequential(OrderedDict((name, Residual(*sizes[name])) for name in names)),
            pool=nn.AdaptiveAvgPool2d(1),
            flat=nn.Flatten(),
            classifier=nn.Linear(6, CLASSES),
        )
    )


def relu_cnn() -> nn.Sequential:
    """One convolution with batch norm and ReLU: compare masks before gradients."""
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(2, 4, 3, padding=1, bias=False),
            bn=nn.BatchNorm2d(4),
            act=nn.ReLU(),
            flat=nn.Flatten(),
            classifier=nn.Linear(4 * 6 * 6, CLASSES),
        )
    )


def wide_then_small(layers: int = 6) -> nn.Sequential:
    """(N, 3, 32, 32) -> (N, 10); training the first layers keeps far more than running them."""
    wide = [nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.Tanh()) for _ in range(layers)]
    return nn.Sequential(
        OrderedDict(
            stem=nn.Conv2d(3, 32, 3, padding=1),
            wide=nn.Sequential(*wide),
            pool=nn.AvgPool2d(4),
            small=nn.Conv2d(32, 16, 3, padding=1),
            flat=nn.Flatten(),
            classifier=nn.Linear(16 * 8 * 8, 10),
        )
    )


def smooth_conv1d() -> nn.Sequential:
    """One-dimensional convolutions, the second with groups and a dilation."""
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv1d(2, 4, 3, padding=1, bias=False),
            bn=nn.BatchNorm1d(4),
            act=nn.Tanh(),
            grouped=nn.Conv1d(4, 8, 2, dilation=2, groups=2),
            bend=nn.GELU(),
            flat=nn.Flatten(),
            classifier=nn.Linear(8 * 7, CLASSES),
        )
    )


def tied_layers(stem: int = 10, hidden: int = 6) -> nn.Sequential:
    """Two layers with one weight between others, a layer and a batch norm with two names."""
    first, second = nn.Linear(stem, hidden), nn.Linear(stem, hidden)
    second.weight = first.weight
    norm, layer = nn.BatchNorm1d(hidden), nn.Linear(hidden, hidden)
    return nn.Sequential(
        OrderedDict(
            flat=nn.Flatten(),
            stem=nn.Linear(72, stem),
            bend=nn.Tanh(),
            first=first,
            norm=norm,
            layer=layer,
            squash=nn.Sigmoid(),
            back=Transposed(first),
            round=nn.Tanh(),
            second=second,
            same_norm=norm,
            same_layer=layer,
            turn=nn.Tanh(),
            classifier=nn.Linear(hidden, CLASSES),
        )
    )


class Transposed(nn.Module):
    """x W with the weight of a linear layer, which computes x W^T."""

    def __init__(self, tied: nn.Linear) -> None:
        super().__init__()
        self.weight = tied.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class TiedTokens(nn.Module):
    """The mean embedding of some tokens, compared with the embedding of every token."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, width)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, CLASSES)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(x).mean(1))))


class TwoTowers(nn.Module):
    """A recommender with a tower for users and one for items, and numbers about both."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(30, 6), nn.Embedding(50, 6)
        self.last = nn.Linear(8, 3)

    def forward(self, user: Tensor, item: Tensor, numbers: Tensor) -> Tensor:
        both = torch.tanh(self.users(user)) * torch.tanh(self.items(item))
        output: Tensor = self.last(torch.cat([both, numbers], 1))
        return output


def two_towers() -> TwoTowers:
    return TwoTowers()


class Photons(nn.Module):
    """Counts of events, which are random in training. A device cannot repeat such draws."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.poisson(x.exp()) if self.training else x
