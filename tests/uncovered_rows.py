"""A row for each kind of layer that is refused, and where the refusal says it is."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from layer_cases import Row
from operator_rows import of


class Volume(nn.Module):
    """A 3-D convolution in the submodule `body`."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv3d(3, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).flatten(1)


def shrunk(x: Tensor) -> Tensor:
    return functional.interpolate(x, (2, 3), mode="bilinear", antialias=True)


IN_FUNCTION = r"operator_rows\.py, line \d+: "
VOLUME = (3, 4, 4, 6)
REFUSED = {
    "3-D convolution": (Row(Volume, VOLUME), "module 'body'"),
    "3-D max pooling": (Row(partial(nn.MaxPool3d, 2), VOLUME), ""),
    "adaptive 3-D pooling": (Row(partial(nn.AdaptiveAvgPool3d, 2), VOLUME), ""),
    "embedding bag": (Row(partial(nn.EmbeddingBag, 7, 4), (5,), limit=7), ""),
    "median": (Row(of(lambda x: x.median(1).values), (3,)), IN_FUNCTION),
    "product over an axis": (Row(of(lambda x: x.prod(1)), (3,)), IN_FUNCTION),
    "antialiased interpolation": (
        Row(
            of(shrunk),
            (3, 4, 5),
        ),
        IN_FUNCTION,
    ),
    "distances of all pairs": (
        Row(of(lambda x: torch.cdist(x, x.sin())), (3, 4)),
        IN_FUNCTION,
    ),
    "inverses and decompositions": (
        Row(of(lambda x: torch.linalg.inv(x + torch.eye(3))), (3, 3)),
        IN_FUNCTION,
    ),
    "sparse gradients": (Row(partial(nn.Embedding, 7, 3, sparse=True), (4,), limit=7), ""),
    "grid sampling": (
        Row(
            of(lambda x: functional.grid_sample(x, x.permute(0, 2, 3, 1), align_corners=False)),
            (2, 4, 4),
        ),
        IN_FUNCTION,
    ),
}
