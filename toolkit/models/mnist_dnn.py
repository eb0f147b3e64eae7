"""TDPFed's two dense layers for MNIST (Table I)."""

from collections import OrderedDict

from torch import nn


def mnist_dnn() -> nn.Sequential:
    """Two dense layers, (N, 1, 28, 28) or (N, 784) -> (N, 10): 79,510 parameters."""
    return nn.Sequential(
        OrderedDict(
            flat=nn.Flatten(),
            fc1=nn.Linear(784, 100),
            act=nn.ReLU(),
            fc2=nn.Linear(100, 10),
        )
    )
