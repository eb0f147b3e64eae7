"""ResNet-20 for 32 x 32 images, with the shapes of EmbracingFL's Table 1."""

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn


class Block(nn.Module):
    """Two 3 x 3 convolutions with batch norm and a shortcut: (N, i, H, W) -> (N, o, H/s, W/s)."""

    def __init__(self, inputs: int, outputs: int, stride: int, projected: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if projected:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet20(nn.Module):
    """A stem, nine blocks of 16, 32 and 64 channels, a mean over the image, and a classifier.

    The first block of each stage, including the first stage, has a projection as its shortcut.
    `blocks` contains all nine blocks.
    """

    def __init__(self, classes: int = 10, channels: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.blocks = nn.Sequential()
        inputs = 16
        for outputs, stride in ((16, 1), (32, 2), (64, 2)):
            for number in range(3):
                first = number == 0
                self.blocks.append(Block(inputs, outputs, stride if first else 1, first))
                inputs = outputs
        self.classifier = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, H, W) -> (N, classes)."""
        y = self.blocks(F.relu(self.bn1(self.conv1(x))))
        return self.classifier(torch.mean(y, (2, 3)))  # type: ignore[no-any-return]


def resnet20() -> ResNet20:
    """ResNet-20 for ten classes: 272,762 parameters."""
    return ResNet20()


def fashion_resnet20() -> ResNet20:
    """ResNet-20 for the ten classes of Fashion-MNIST (1 x 28 x 28): 272,474 parameters."""
    return ResNet20(channels=1)
