"""Models for the tests of the command `edgetailor`."""

import numpy as np

from edgetailor import load_model
from toolkit.submodels.global_model import from_model

DIGITS = ("toolkit.models:digits_cnn", "--input-shape", "1,8,8")
NETS = '''
from collections import OrderedDict

import torch
from torch import nn


def tiny():
    """(N, 1, 6, 6) -> (N, 8)."""
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(1, 4, 3, stride=2, padding=1, bias=False),
            bn=nn.BatchNorm2d(4),
            act=nn.ReLU(),
            flat=nn.Flatten(),
            classifier=nn.Linear(36, 8),
        )
    )


class Glance(nn.Module):
    """Samples one spot of the image; the gradient of cubic curves cannot be exported yet."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.classifier = nn.Linear(8, 8)

    def forward(self, x):
        spot = torch.zeros(1, 2, 2, 2).expand(x.shape[0], 2, 2, 2)
        seen = nn.functional.grid_sample(self.conv(x), spot, "bicubic", align_corners=False)
        return self.classifier(seen.flatten(1))


def table():
    return {}


def broken():
    raise LookupError("the weights are on the other machine")


def alone():
    return nn.Linear(4, 2)


class Words(nn.Module):
    """(N, 6) words of 20 -> (N, 3)."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 12, batch_first=True)
        self.classifier = nn.Linear(12, 3)

    def forward(self, x):
        return self.classifier(self.lstm(self.embedding(x))[0][:, -1])


def separable():
    """Depthwise and 1 x 1 convolutions, which hold most of the weights."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.Conv2d(16, 16, 3, padding=1, groups=16),
        nn.Conv2d(16, 64, 1),
        nn.Conv2d(64, 64, 3, padding=1, groups=64),
        nn.Conv2d(64, 128, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 3),
    )


class Photons(nn.Module):
    def forward(self, x):
        return torch.poisson(x.exp()) if self.training else x


def dropping():
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), Photons())


number = 3
'''
TINY = ("nets:tiny", "--input-shape", "1,6,6", "--batch", "4")


def digits_weights() -> dict[str, np.ndarray]:
    tensors = from_model(load_model(DIGITS[0])).tensors
    return {name: value.numpy() for name, value in tensors.items()}
