"""LEAF's convolutional network for FEMNIST, as EmbracingFL's Table 1 counts it."""

from torch import Tensor, nn


class FemnistCNN(nn.Module):
    """Two 5 x 5 convolutions of 32 and 64 channels with 2 x 2 max-pooling, and two dense layers.

    For each sample, `features` has 3,136 outputs and `dense` 2,048.
    """

    def __init__(self, classes: int = 62) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.dense = nn.Sequential(nn.Linear(64 * 7 * 7, 2048), nn.ReLU())
        self.classifier = nn.Linear(2048, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 1, 28, 28) -> (N, classes)."""
        return self.classifier(self.dense(self.features(x)))  # type: ignore[no-any-return]


def femnist_cnn() -> FemnistCNN:
    """The network for 62 classes of handwritten characters (1 x 28 x 28): 6,603,710 parameters."""
    return FemnistCNN()


def fashion_cnn() -> FemnistCNN:
    """The network for the ten classes of Fashion-MNIST (1 x 28 x 28): 6,497,162 parameters."""
    return FemnistCNN(10)
