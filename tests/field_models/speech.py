"""Speech: a recognizer with CTC, a spotter of keywords on raw audio, speaker embeddings."""

import math

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn


class ConvolutionModule(nn.Module):
    def __init__(self, dim: int, kernel_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.pointwise1 = nn.Conv1d(dim, 2 * dim, 1)
        self.depthwise = nn.Conv1d(
            dim, dim, kernel_size, padding=(kernel_size - 1) // 2, groups=dim
        )
        self.batch_norm = nn.BatchNorm1d(dim)
        self.pointwise2 = nn.Conv1d(dim, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x).transpose(1, 2)
        x = F.glu(self.pointwise1(x), dim=1)
        x = F.silu(self.batch_norm(self.depthwise(x)))
        return self.pointwise2(x).transpose(1, 2)


class RelativeAttention(nn.Module):
    """Attention with learned biases of distances."""

    def __init__(self, dim: int, heads: int, max_len: int = 32) -> None:
        super().__init__()
        self.heads, self.max_len = heads, max_len
        self.norm = nn.LayerNorm(dim)
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
        self.bias = nn.Embedding(2 * max_len - 1, heads)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        x = self.norm(x)
        q, k, v = (
            layer(x).view(b, t, self.heads, d // self.heads).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(d // self.heads)
        position = torch.arange(t, device=x.device)
        distance = position[None, :] - position[:, None] + self.max_len - 1
        scores = scores + self.bias(distance).permute(2, 0, 1).unsqueeze(0)
        context = torch.matmul(scores.softmax(dim=-1), v)
        return self.out(context.transpose(1, 2).reshape(b, t, d))


class ConformerBlock(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ff1, self.ff2 = (
            nn.Sequential(
                nn.LayerNorm(dim),
                nn.Linear(dim, 4 * dim),
                nn.SiLU(),
                nn.Dropout(dropout),
                nn.Linear(4 * dim, dim),
            )
            for _ in range(2)
        )
        self.attention = RelativeAttention(dim, heads)
        self.conv = ConvolutionModule(dim, 5)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.ff1(x)
        x = x + self.attention(x)
        x = x + self.conv(x)
        x = x + 0.5 * self.ff2(x)
        return self.norm(x)


class ConformerCTC(nn.Module):
    def __init__(self, n_mels: int = 16, dim: int = 16, vocab: int = 8) -> None:
        super().__init__()
        self.subsample = nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.project = nn.Linear(4 * (n_mels // 4), dim)
        self.blocks = nn.ModuleList(ConformerBlock(dim, 2, 0.1) for _ in range(2))
        self.ctc = nn.Linear(dim, vocab)

    def forward(self, mel: Tensor) -> Tensor:
        x = self.subsample(mel.unsqueeze(1))
        b, c, t, f = x.size()
        x = self.project(x.permute(0, 2, 1, 3).contiguous().view(b, t, c * f))
        for block in self.blocks:
            x = block(x)
        return self.ctc(x)


class LogMel(nn.Module):
    def __init__(self, sample_rate: int = 800, n_fft: int = 64, hop: int = 32, n_mels: int = 10):
        super().__init__()
        self.n_fft, self.hop = n_fft, hop
        self.register_buffer("window", torch.hann_window(n_fft))
        self.register_buffer("filters", self.mel_filters(sample_rate, n_fft, n_mels))

    @staticmethod
    def mel_filters(sample_rate: int, n_fft: int, n_mels: int) -> Tensor:
        highest = 2595 * math.log10(1 + sample_rate / 2 / 700)
        hertz = 700 * (10 ** (torch.linspace(0, highest, n_mels + 2) / 2595) - 1)
        bins = torch.linspace(0, sample_rate / 2, n_fft // 2 + 1)
        rising = (bins[None] - hertz[:-2, None]) / (hertz[1:-1] - hertz[:-2])[:, None]
        falling = (hertz[2:, None] - bins[None]) / (hertz[2:] - hertz[1:-1])[:, None]
        return torch.minimum(rising, falling).clamp(min=0)

    def forward(self, audio: Tensor) -> Tensor:
        spectrum = torch.stft(
            audio, self.n_fft, self.hop, window=self.window, center=True, return_complex=True
        )
        power = spectrum.abs().pow(2)
        return torch.log(torch.matmul(self.filters, power) + 1e-6)


class KeywordSpotter(nn.Module):
    """A DS-CNN on raw audio."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.features = LogMel()
        self.norm = nn.BatchNorm2d(1)
        self.stem = nn.Sequential(nn.Conv2d(1, 8, (5, 3), 2, (2, 1)), nn.BatchNorm2d(8), nn.ReLU())
        self.separable = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 12, 1, bias=False),
            nn.BatchNorm2d(12),
            nn.ReLU(inplace=True),
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(12, classes)

    def forward(self, audio: Tensor) -> Tensor:
        x = self.norm(self.features(audio).unsqueeze(1))
        x = self.pool(self.separable(self.stem(x)))
        return self.fc(torch.flatten(x, 1))


class XVector(nn.Module):
    """TDNN layers, then mean and deviation over time."""

    def __init__(self, n_mels: int = 12, speakers: int = 6) -> None:
        super().__init__()
        layers = []
        for inputs, outputs, kernel, dilation in (
            (n_mels, 16, 5, 1),
            (16, 16, 3, 2),
            (16, 24, 1, 1),
        ):
            layers += [
                nn.Conv1d(inputs, outputs, kernel, dilation=dilation),
                nn.LeakyReLU(0.2),
                nn.BatchNorm1d(outputs),
            ]
        self.frames = nn.Sequential(*layers)
        self.attention = nn.Sequential(nn.Conv1d(24, 8, 1), nn.Tanh(), nn.Conv1d(8, 24, 1))
        self.embedding = nn.Linear(48, 16)
        self.weight = nn.Parameter(torch.empty(speakers, 16))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = self.frames(x)
        w = torch.softmax(self.attention(h), dim=2)
        mean = torch.sum(h * w, dim=2)
        deviation = torch.sqrt((torch.sum(h**2 * w, dim=2) - mean**2).clamp(min=1e-4))
        embedding = self.embedding(torch.cat((mean, deviation), dim=1))
        return 10.0 * F.linear(F.normalize(embedding), F.normalize(self.weight))
