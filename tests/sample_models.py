"""Small models for samples that are prepared from pictures and CSV files."""

from collections import OrderedDict

import torch
from torch import Tensor, nn

CLASSES = 3


def pictures() -> nn.Module:
    """For pictures (3, h, w)."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2), nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(24, CLASSES),
    )  # fmt: skip


class Windows(nn.Module):
    """For windows (7, 6), or (6, 7) with the channels first."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first
        self.conv = nn.Conv1d(6, 8, 3)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.first else x.transpose(1, 2)
        return self.head(torch.tanh(self.conv(x)).mean(2))


def series_first() -> nn.Module:
    return Windows(True)


def series_last() -> nn.Module:
    return Windows(False)


def pictures_with_statistics() -> nn.Module:
    """For pictures (3, h, w), with batch norms, whose statistics differ from device to device."""
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(3, 6, 3, stride=2), bn=nn.BatchNorm2d(6), act=nn.GELU(),
            hidden=nn.Conv2d(6, 8, 3, padding=1), norm=nn.BatchNorm2d(8), bend=nn.Tanh(),
            pool=nn.AdaptiveAvgPool2d(2), flat=nn.Flatten(), classifier=nn.Linear(32, CLASSES),
        )
    )  # fmt: skip


def large_for_pictures() -> nn.Module:
    """For pictures (3, 16, 12): weights of 18 MB, more than a page's runtime begins with."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(3 * 16 * 12, 8000), nn.Tanh(), nn.Linear(8000, CLASSES)
    )
