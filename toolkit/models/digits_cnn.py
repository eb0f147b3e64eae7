"""A small convolutional network with batch normalisation for 8 x 8 greyscale images."""

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn


class Unit(nn.Module):
    """3 x 3 convolution, batch norm, ReLU: (N, i, H, W) -> (N, o, H/s, W/s)."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return F.relu(self.bn(self.conv(x)))


class DigitsCNN(nn.Module):
    """Four units of 16, 32, 32 and 64 channels, a mean over the image, and a classifier."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.units = nn.Sequential(Unit(1, 16), Unit(16, 32), Unit(32, 32, 2), Unit(32, 64))
        self.classifier = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 1, 8, 8) -> (N, classes)."""
        return self.classifier(torch.mean(self.units(x), (2, 3)))  # type: ignore[no-any-return]


def digits_cnn() -> DigitsCNN:
    """The model of the demo, with ten classes."""
    return DigitsCNN()
