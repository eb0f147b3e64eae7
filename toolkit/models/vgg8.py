"""TDPFed's VGG8 for CIFAR-10 (Table I): five convolutions and three dense layers."""

from itertools import pairwise

from torch import Tensor, nn

WIDTHS = (3, 32, 64, 128, 256, 256)


class VGG8(nn.Module):
    """3 x 3 convolutions of 32 to 256 channels, then dense layers of 256, 256 and 10.

    Max-pooling after each convolution halves the image, from 32 x 32 to one pixel. So the first
    dense layer has 256 inputs, as in Table I.
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.convs = nn.Sequential()
        for inputs, outputs in pairwise(WIDTHS):
            self.convs.append(
                nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
            )
        self.flat = nn.Flatten()
        self.fc1 = nn.Sequential(nn.Linear(256, 256), nn.ReLU())
        self.fc2 = nn.Sequential(nn.Linear(256, 256), nn.ReLU())
        self.fc3 = nn.Linear(256, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, 32, 32) -> (N, classes)."""
        return self.fc3(self.fc2(self.fc1(self.flat(self.convs(x)))))  # type: ignore[no-any-return]


def vgg8() -> VGG8:
    """The network for ten classes of 3 x 32 x 32 images: 1,112,650 parameters."""
    return VGG8()
