"""One row for each unsupported operator group, with the place that the error must name."""

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from exporters.programs.operator_support import UNSUPPORTED
from exporters.programs.program import ProgramSignature
from layer_cases import Case, Row
from profiles.errors import ExportError
from row_kinds import of


class Volume(nn.Module):
    """A 3-D convolution in the submodule `body`."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv3d(3, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).flatten(1)


class Bags(nn.Module):
    """A bag for each sample, given by offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.bags(x.flatten(), torch.arange(x.shape[0]) * x.shape[1])


def shrunk(x: Tensor) -> Tensor:
    return functional.interpolate(x, (2, 3), mode="bilinear", antialias=True)


def sampled(x: Tensor) -> Tensor:
    return functional.grid_sample(x, x.permute(0, 2, 3, 1), "bicubic", align_corners=False)


def overwritten(x: Tensor) -> Tensor:
    y = x.sin()
    y.as_strided((2,), (1,)).zero_()
    return y


IN_FUNCTION = r"uncovered_rows\.py, line \d+: "
VOLUME = (3, 4, 4, 6)
REFUSED = {
    "3-D convolution": (Row(Volume, VOLUME), "module 'body'"),
    "3-D max pooling": (Row(partial(nn.MaxPool3d, 2), VOLUME), ""),
    "adaptive 3-D pooling": (Row(partial(nn.AdaptiveAvgPool3d, 2), VOLUME), ""),
    "embedding bag with offsets": (Row(Bags, (5,), limit=7), r"uncovered_rows\.py, line \d+: "),
    "median of all numbers": (Row(of(lambda x: x - x.median()), (3,)), IN_FUNCTION),
    "product of all numbers": (Row(of(lambda x: x * x.prod()), (3,)), IN_FUNCTION),
    "antialiased interpolation": (
        Row(
            of(shrunk),
            (3, 4, 5),
        ),
        IN_FUNCTION,
    ),
    "decompositions, and inverses of large matrices": (
        Row(of(lambda x: torch.linalg.inv(x + torch.eye(33))), (33, 33)),
        IN_FUNCTION,
    ),
    "sparse gradients": (Row(partial(nn.Embedding, 7, 3, sparse=True), (4,), limit=7), ""),
    "writes through strides": (Row(of(overwritten), (3, 4)), IN_FUNCTION),
    "bicubic, reflecting and 3-D grid sampling": (
        Row(of(sampled), (2, 4, 4)),
        IN_FUNCTION,
    ),
    "special functions": (Row(of(lambda x: x.tanh().erfinv()), (3,)), IN_FUNCTION),
    "histograms": (Row(of(lambda x: x * torch.histc(x, 4)[0]), (3,)), IN_FUNCTION),
    "distances of pairs without repetition": (
        Row(of(lambda x: x * functional.pdist(x).mean()), (3,)),
        IN_FUNCTION,
    ),
    "masked scatter": (Row(of(lambda x: x.masked_scatter(x > 0, x.sin())), (3,)), IN_FUNCTION),
}


def check_refused(name: str, lower: Callable[[ProgramSignature], object]) -> None:
    """The error of `lower` names the operator of the row, its place and the table's alternative."""
    row, where = REFUSED[name]
    (group,) = [g for g in UNSUPPORTED if g.name == name]
    advice = re.escape(f"no support for {name} ({group.reason}); use {group.alternative}.")
    case = Case.of(row, record=True)
    with pytest.raises(ExportError, match=rf"operator aten::\w+.*{where}.*: {advice}$"):
        lower(case.signature)
