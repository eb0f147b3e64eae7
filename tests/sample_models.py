"""Small models for samples that are prepared from pictures and CSV files."""

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
