"""Forecasts of time series, (batch, time, variables) or (batch, time)."""

import math

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn


class NBeatsBlock(nn.Module):
    def __init__(self, backcast: int, horizon: int, basis: str, width: int = 16) -> None:
        super().__init__()
        self.fc = nn.Sequential(
            nn.Linear(backcast, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.basis = basis
        self.terms = 3 if basis == "trend" else 4
        self.theta_b = nn.Linear(width, self.terms, bias=False)
        self.theta_f = nn.Linear(width, self.terms, bias=False)
        self.backcast, self.horizon = backcast, horizon

    def functions(self, length: int) -> Tensor:
        time = np.arange(length) / length
        if self.basis == "trend":
            rows = [time**i for i in range(self.terms)]
        else:
            rows = [np.cos(2 * np.pi * i * time) for i in range(self.terms // 2)]
            rows += [np.sin(2 * np.pi * i * time) for i in range(self.terms // 2)]
        return torch.tensor(np.array(rows)).float()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.fc(x)
        back = self.functions(self.backcast).to(x)
        ahead = self.functions(self.horizon).to(x)
        return self.theta_b(h).mm(back), self.theta_f(h).mm(ahead)


class NBeats(nn.Module):
    def __init__(self, backcast: int = 24, horizon: int = 6) -> None:
        super().__init__()
        self.horizon = horizon
        self.stacks = nn.ModuleList(
            [
                nn.ModuleList([NBeatsBlock(backcast, horizon, basis) for _ in range(2)])
                for basis in ("trend", "seasonality")
            ]
        )

    def forward(self, backcast: Tensor) -> Tensor:
        forecast = torch.zeros(backcast.size(0), self.horizon).to(backcast)
        for stack in self.stacks:
            for block in stack:
                b, f = block(backcast)
                backcast = backcast - b
                forecast = forecast + f
        return forecast


class MovingAverage(nn.Module):
    def __init__(self, kernel_size: int) -> None:
        super().__init__()
        self.kernel_size = kernel_size
        self.avg = nn.AvgPool1d(kernel_size=kernel_size, stride=1, padding=0)

    def forward(self, x: Tensor) -> Tensor:
        front = x[:, 0:1, :].repeat(1, (self.kernel_size - 1) // 2, 1)
        end = x[:, -1:, :].repeat(1, (self.kernel_size - 1) // 2, 1)
        x = torch.cat([front, x, end], dim=1)
        return self.avg(x.permute(0, 2, 1)).permute(0, 2, 1)


class DLinear(nn.Module):
    def __init__(self, seq_len: int = 24, pred_len: int = 8, channels: int = 3) -> None:
        super().__init__()
        self.pred_len, self.channels = pred_len, channels
        self.moving_avg = MovingAverage(5)
        self.seasonal = nn.ModuleList(nn.Linear(seq_len, pred_len) for _ in range(channels))
        self.trend = nn.ModuleList(nn.Linear(seq_len, pred_len) for _ in range(channels))

    def forward(self, x: Tensor) -> Tensor:
        trend = self.moving_avg(x)
        seasonal, trend = (x - trend).permute(0, 2, 1), trend.permute(0, 2, 1)
        out = torch.zeros([x.size(0), self.channels, self.pred_len], dtype=x.dtype).to(x.device)
        for i in range(self.channels):
            out[:, i, :] = self.seasonal[i](seasonal[:, i, :]) + self.trend[i](trend[:, i, :])
        return out.permute(0, 2, 1)


class PositionalEmbedding(nn.Module):
    def __init__(self, dim: int, max_len: int = 64) -> None:
        super().__init__()
        pe = torch.zeros(max_len, dim).float()
        position = torch.arange(0, max_len).float().unsqueeze(1)
        div_term = (torch.arange(0, dim, 2).float() * -(math.log(10000.0) / dim)).exp()
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe.unsqueeze(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.pe[:, : x.size(1)]


class InformerLayer(nn.Module):
    """Queries whose scores stand out attend; the others take the mean of the values."""

    def __init__(self, dim: int, heads: int, active: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.active = heads, active
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        self.out = nn.Linear(dim, dim)
        self.conv1, self.conv2 = nn.Conv1d(dim, 2 * dim, 1), nn.Conv1d(2 * dim, dim, 1)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def attention(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (
            f(x).view(b, t, self.heads, -1).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(d // self.heads)
        sparsity = scores.max(-1)[0] - scores.mean(-1)
        top = sparsity.topk(self.active, sorted=False)[1]
        index = top.unsqueeze(-1).expand(-1, -1, -1, t)
        attended = torch.matmul(torch.softmax(scores.gather(2, index), dim=-1), v)
        context = v.mean(dim=-2, keepdim=True).expand(-1, -1, t, -1).clone()
        rows = top.unsqueeze(-1).expand(-1, -1, -1, v.size(-1))
        context = context.scatter(2, rows, attended)
        return self.out(context.transpose(1, 2).contiguous().view(b, t, -1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout(self.attention(x)))
        y = self.dropout(F.gelu(self.conv1(x.transpose(-1, 1))))
        y = self.dropout(self.conv2(y).transpose(-1, 1))
        return self.norm2(x + y)


class Informer(nn.Module):
    def __init__(self, variables: int = 3, dim: int = 12, pred_len: int = 4) -> None:
        super().__init__()
        self.pred_len = pred_len
        self.token = nn.Conv1d(variables, dim, 3, padding=1, padding_mode="circular", bias=False)
        self.position = PositionalEmbedding(dim)
        self.layer1 = InformerLayer(dim, 2, 5, 0.05)
        self.distil = nn.Sequential(
            nn.Conv1d(dim, dim, 3, padding=1, padding_mode="circular"),
            nn.BatchNorm1d(dim),
            nn.ELU(),
            nn.MaxPool1d(3, 2, 1),
        )
        self.layer2 = InformerLayer(dim, 2, 4, 0.05)
        self.projection = nn.Linear(dim, variables)

    def forward(self, x: Tensor) -> Tensor:
        h = self.token(x.permute(0, 2, 1)).transpose(1, 2) + self.position(x)
        h = self.layer1(h)
        h = self.distil(h.permute(0, 2, 1)).transpose(1, 2)
        return self.projection(self.layer2(h))[:, -self.pred_len :, :]


class Seq2Seq(nn.Module):
    """An encoder, and a decoder that reads its own forecasts."""

    def __init__(self, variables: int = 2, hidden: int = 12, horizon: int = 4) -> None:
        super().__init__()
        self.horizon = horizon
        self.encoder = nn.LSTM(variables, hidden, num_layers=1, batch_first=True)
        self.decoder = nn.LSTM(variables, hidden, num_layers=1, batch_first=True)
        self.fc = nn.Linear(hidden, variables)

    def forward(self, x: Tensor) -> Tensor:
        _, (h, c) = self.encoder(x)
        step, outputs = x[:, -1:, :], []
        for _ in range(self.horizon):
            out, (h, c) = self.decoder(step, (h, c))
            step = self.fc(out)
            outputs.append(step)
        return torch.cat(outputs, dim=1)


class DeepAR(nn.Module):
    """A cell that the user steps through time."""

    def __init__(self, hidden: int = 12, horizon: int = 3) -> None:
        super().__init__()
        self.hidden, self.horizon = hidden, horizon
        self.cell = nn.LSTMCell(1, hidden)
        self.head = nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.size(0), self.hidden, device=x.device, dtype=x.dtype)
        c = torch.zeros_like(h)
        for t in range(x.size(1)):
            h, c = self.cell(x[:, t : t + 1], (h, c))
        forecast = []
        for _ in range(self.horizon):
            y = self.head(h)
            forecast.append(y)
            h, c = self.cell(y, (h, c))
        return torch.cat(forecast, 1)


class RevIN(nn.Module):
    def __init__(self, variables: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.affine_weight = nn.Parameter(torch.ones(variables))
        self.affine_bias = nn.Parameter(torch.zeros(variables))

    def normalize(self, x: Tensor) -> Tensor:
        self.mean = torch.mean(x, dim=1, keepdim=True).detach()
        self.stdev = torch.sqrt(torch.var(x, dim=1, keepdim=True, unbiased=False) + self.eps)
        self.stdev = self.stdev.detach()
        return (x - self.mean) / self.stdev * self.affine_weight + self.affine_bias

    def denormalize(self, x: Tensor) -> Tensor:
        x = (x - self.affine_bias) / (self.affine_weight + self.eps * self.eps)
        return x * self.stdev + self.mean


class PatchTST(nn.Module):
    def __init__(self, seq_len: int = 24, pred_len: int = 6, variables: int = 3) -> None:
        super().__init__()
        dim, self.patch, self.stride = 16, 8, 4
        self.revin = RevIN(variables)
        self.pad = nn.ReplicationPad1d((0, self.stride))
        patches = (seq_len - self.patch) // self.stride + 2
        self.embed = nn.Linear(self.patch, dim)
        self.position = nn.Parameter(torch.randn(1, patches, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(dim, 4, 32, 0.1, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Sequential(
            nn.Flatten(start_dim=-2), nn.Linear(patches * dim, pred_len), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        b, _, v = x.shape
        x = self.pad(self.revin.normalize(x).permute(0, 2, 1))
        x = x.unfold(dimension=-1, size=self.patch, step=self.stride)
        x = torch.reshape(x, (b * v, x.shape[2], x.shape[3]))
        h = self.encoder(self.embed(x) + self.position)
        y = self.head(torch.reshape(h, (b, v, h.shape[-2], h.shape[-1])))
        return self.revin.denormalize(y.permute(0, 2, 1))
