"""A model that computes something between two layers."""

from collections.abc import Callable

from torch import Tensor, nn

Compute = Callable[[Tensor], Tensor]


class Between(nn.Module):
    """Two linear layers, and what a model computes between them."""

    def __init__(self, compute: Compute, only_training: bool = True) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.compute, self.only_training = compute, only_training

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(self.compute(h) if self.training or not self.only_training else h)
