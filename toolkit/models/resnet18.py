"""ResNet-18 and ResNet-34 for small images, with the shapes of FedHM's Tables 5 and 6.

Unlike the models for ImageNet, they start with a 3 x 3 convolution of stride 1 and no pooling.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn

from toolkit.models.resnet20 import Block

WIDTHS = (64, 128, 256, 512)


class ResNet(nn.Module):
    """A stem, four stages of 64 to 512 channels, a mean over the image, and a classifier.

    `depths` are the numbers of blocks in the stages. If a block changes the shape, its shortcut is
    a projection. `blocks` contains the blocks of all stages.
    """

    def __init__(self, depths: Sequence[int], classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.blocks = nn.Sequential()
        inputs = WIDTHS[0]
        for outputs, depth in zip(WIDTHS, depths, strict=True):
            for _ in range(depth):
                changes = inputs != outputs
                self.blocks.append(Block(inputs, outputs, 2 if changes else 1, changes))
                inputs = outputs
        self.classifier = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, classes)."""
        y = self.blocks(F.relu(self.bn1(self.conv1(x))))
        return self.classifier(torch.mean(y, (2, 3)))  # type: ignore[no-any-return]


def resnet18() -> ResNet:
    """ResNet-18 for CIFAR-10 (3 x 32 x 32): 11,173,962 parameters."""
    return ResNet((2, 2, 2, 2), classes=10)


def resnet34() -> ResNet:
    """ResNet-34 for CIFAR-100 (3 x 32 x 32): 21,328,292 parameters."""
    return ResNet((3, 4, 6, 3), classes=100)


def resnet34_tiny_imagenet() -> ResNet:
    """ResNet-34 for Tiny-ImageNet (3 x 64 x 64): 21,379,592 parameters."""
    return ResNet((3, 4, 6, 3), classes=200)
