"""A small residual network for 8 x 8 greyscale images, with enough blocks to leave some out."""

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn

from toolkit.models.resnet20 import Block


class DigitsResNet(nn.Module):
    """A stem, two stages of four blocks of 16 and of 32 channels, and a classifier."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*(Block(16, 16, 1, False) for _ in range(4)))
        self.layer2 = nn.Sequential(
            Block(16, 32, 2, True), *(Block(32, 32, 1, False) for _ in range(3))
        )
        self.classifier = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 1, 8, 8) -> (N, classes)."""
        y = self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x)))))
        return self.classifier(torch.mean(y, (2, 3)))  # type: ignore[no-any-return]


def digits_resnet() -> DigitsResNet:
    """A residual network of eight blocks, with ten classes."""
    return DigitsResNet()
