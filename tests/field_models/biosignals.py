"""Biosignals: EEG, ECG and wearables."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm


class EEGNet(nn.Module):
    def __init__(self, chans: int = 6, samples: int = 64, classes: int = 4) -> None:
        super().__init__()
        f1, d, f2 = 4, 2, 8
        self.block1 = nn.Sequential(
            nn.ZeroPad2d((7, 8, 0, 0)),
            nn.Conv2d(1, f1, (1, 16), bias=False),
            nn.BatchNorm2d(f1, momentum=0.01, eps=1e-3),
            nn.Conv2d(f1, f1 * d, (chans, 1), groups=f1, bias=False),
            nn.BatchNorm2d(f1 * d, momentum=0.01, eps=1e-3),
            nn.ELU(),
            nn.AvgPool2d((1, 4)),
            nn.Dropout(0.25),
        )
        self.block2 = nn.Sequential(
            nn.ZeroPad2d((3, 4, 0, 0)),
            nn.Conv2d(f1 * d, f1 * d, (1, 8), groups=f1 * d, bias=False),
            nn.Conv2d(f1 * d, f2, 1, bias=False),
            nn.BatchNorm2d(f2, momentum=0.01, eps=1e-3),
            nn.ELU(),
            nn.AvgPool2d((1, 8)),
            nn.Dropout(0.25),
        )
        with torch.no_grad():
            features = self.block2(self.block1(torch.zeros(1, 1, chans, samples))).numel()
        self.classifier = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 3:
            x = x.unsqueeze(1)
        x = self.block2(self.block1(x))
        return self.classifier(x.view(x.size(0), -1))


class Conv2dWithConstraint(nn.Conv2d):
    def __init__(self, *args: Any, max_norm: float = 1.0, **kwargs: Any) -> None:
        self.max_norm = max_norm
        super().__init__(*args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=self.max_norm)
        return super().forward(x)


class LinearWithConstraint(nn.Linear):
    def __init__(self, *args: Any, max_norm: float = 0.25, **kwargs: Any) -> None:
        self.max_norm = max_norm
        super().__init__(*args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.copy_(torch.renorm(self.weight, p=2, dim=0, maxnorm=self.max_norm))
        return super().forward(x)


class ConstrainedEEGNet(EEGNet):
    """With the largest norms of its paper."""

    def __init__(self) -> None:
        super().__init__()
        self.block1[3] = Conv2dWithConstraint(4, 8, (6, 1), groups=4, bias=False)
        self.classifier = LinearWithConstraint(self.classifier.in_features, 4)


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int, reduction: int = 4) -> None:
        super().__init__()
        self.fc = nn.Sequential(
            nn.Linear(channels, channels // reduction, bias=False),
            nn.ReLU(inplace=True),
            nn.Linear(channels // reduction, channels, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        b, c, _ = x.size()
        y = F.adaptive_avg_pool1d(x, 1).view(b, c)
        return x * self.fc(y).view(b, c, 1).expand_as(x)


class BasicBlock1d(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(inputs, outputs, 7, stride, 3, bias=False)
        self.bn1 = nn.BatchNorm1d(outputs)
        self.conv2 = nn.Conv1d(outputs, outputs, 7, 1, 3, bias=False)
        self.bn2 = nn.BatchNorm1d(outputs)
        self.se = SqueezeExcite(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv1d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm1d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.se(self.bn2(self.conv2(out)))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return F.relu(out)


class ECGResNet(nn.Module):
    """Twelve leads, five rhythms."""

    def __init__(self, leads: int = 12, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv1d(leads, 8, 15, 2, 7, bias=False),
            nn.BatchNorm1d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool1d(3, 2, 1),
        )
        self.layer1 = BasicBlock1d(8, 8, 1)
        self.layer2 = BasicBlock1d(8, 16, 2)
        self.fc = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.stem(x)))
        pooled = torch.cat([x.mean(dim=-1), x.max(dim=-1)[0]], dim=1)
        return self.fc(pooled)


class Chomp1d(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, : -self.size].contiguous()


class TemporalBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, dilation: int, dropout: float) -> None:
        super().__init__()
        padding = 2 * dilation
        self.net = nn.Sequential(
            weight_norm(nn.Conv1d(inputs, outputs, 3, padding=padding, dilation=dilation)),
            Chomp1d(padding),
            nn.ReLU(),
            nn.Dropout(dropout),
            weight_norm(nn.Conv1d(outputs, outputs, 3, padding=padding, dilation=dilation)),
            Chomp1d(padding),
            nn.ReLU(),
            nn.Dropout(dropout),
        )
        self.skip = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.net(x) + self.skip(x))


class TCN(nn.Module):
    """Activities from an accelerometer, (batch, time, axes)."""

    def __init__(self, axes: int = 3, classes: int = 6) -> None:
        super().__init__()
        widths = [axes, 8, 8, 12]
        self.tcn = nn.Sequential(
            *(TemporalBlock(widths[i], widths[i + 1], 2**i, 0.2) for i in range(3))
        )
        self.fc = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.tcn(x.permute(0, 2, 1))[:, :, -1])


class SleepStager(nn.Module):
    """Two kernels of EEG for each epoch of sleep, then an LSTM over the epochs of a night."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.fine = nn.Sequential(nn.Conv1d(1, 6, 8, 4), nn.ReLU(), nn.MaxPool1d(2))
        self.coarse = nn.Sequential(nn.Conv1d(1, 6, 24, 8), nn.ReLU(), nn.MaxPool1d(2))
        self.lstm = nn.LSTM(12, 8, num_layers=2, batch_first=True, bidirectional=True, dropout=0.2)
        self.fc = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        b, epochs, samples = x.shape
        x = x.reshape(b * epochs, 1, samples)
        features = torch.cat([self.fine(x).mean(-1), self.coarse(x).mean(-1)], dim=-1)
        self.lstm.flatten_parameters()
        out, _ = self.lstm(features.view(b, epochs, -1))
        return self.fc(out)
