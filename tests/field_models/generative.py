"""Generative models: they reconstruct, denoise or continue their input."""

import math

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn


class VAE(nn.Module):
    """A variational autoencoder that returns the reconstruction."""

    def __init__(self, inputs: int = 16, hidden: int = 12, latent: int = 3) -> None:
        super().__init__()
        self.fc1 = nn.Linear(inputs, hidden)
        self.fc21, self.fc22 = nn.Linear(hidden, latent), nn.Linear(hidden, latent)
        self.fc3, self.fc4 = nn.Linear(latent, hidden), nn.Linear(hidden, inputs)

    def reparameterize(self, mu: Tensor, logvar: Tensor) -> Tensor:
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.fc1(x))
        mu, logvar = self.fc21(h), self.fc22(h)
        z = self.reparameterize(mu, logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))


class PoolingAutoencoder(nn.Module):
    """An autoencoder whose decoder puts values where the maxima were."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1)
        self.pool = nn.MaxPool2d(2, stride=2, return_indices=True)
        self.unpool = nn.MaxUnpool2d(2, stride=2)
        self.deconv2 = nn.ConvTranspose2d(8, 6, 3, padding=1)
        self.deconv1 = nn.ConvTranspose2d(6, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        size1 = x.size()
        x, index1 = self.pool(F.relu(self.conv1(x)))
        size2 = x.size()
        x, index2 = self.pool(F.relu(self.conv2(x)))
        x = self.unpool(x, index2, output_size=size2)
        x = F.relu(self.deconv2(x))
        x = self.unpool(x, index1, output_size=size1)
        return self.deconv1(x)


class TimeEmbedding(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, t: Tensor) -> Tensor:
        half = self.dim // 2
        frequencies = torch.exp(-math.log(10000) * torch.arange(half, device=t.device) / half)
        angles = t[:, None] * frequencies[None, :].to(t)
        return self.mlp(torch.cat([angles.sin(), angles.cos()], dim=-1))


class DenoisingBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, time_dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(2, inputs), nn.GroupNorm(2, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(time_dim, 2 * outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.time(t)[:, :, None, None].chunk(2, dim=1)
        h = self.norm2(h) * (1 + scale) + shift
        return self.skip(x) + self.conv2(F.silu(h))


class Denoiser(nn.Module):
    """Predicts the noise; the last channel of a sample holds its time step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = TimeEmbedding(8)
        self.inc = nn.Conv2d(1, 4, 3, padding=1)
        self.down = DenoisingBlock(4, 8, 8)
        self.mid = DenoisingBlock(8, 8, 8)
        self.up = DenoisingBlock(12, 4, 8)
        self.out = nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x, t = x[:, :1], x[:, 1, 0, 0]
        t = self.embed(t)
        h1 = self.inc(x)
        h2 = self.mid(self.down(F.avg_pool2d(h1, 2), t), t)
        up = F.interpolate(h2, scale_factor=2, mode="nearest")
        return self.out(self.up(torch.cat([up, h1], dim=1), t))


class CausalSelfAttention(nn.Module):
    def __init__(self, dim: int, heads: int, block_size: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.attn_dropout = nn.Dropout(0.1)
        mask = torch.tril(torch.ones(block_size, block_size))
        self.register_buffer("bias", mask.view(1, 1, block_size, block_size))
        self.heads, self.dim = heads, dim

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(self.dim, dim=2)
        q, k, v = (u.view(b, t, self.heads, c // self.heads).transpose(1, 2) for u in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class GPT(nn.Module):
    """A language model with tied embeddings; a class for every position."""

    def __init__(self, vocab: int = 24, block_size: int = 10, dim: int = 16) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab, dim),
                "wpe": nn.Embedding(block_size, dim),
                "h": nn.ModuleList(
                    nn.ModuleDict(
                        {
                            "ln_1": nn.LayerNorm(dim),
                            "attn": CausalSelfAttention(dim, 2, block_size),
                            "ln_2": nn.LayerNorm(dim),
                            "mlp": nn.Sequential(
                                nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
                            ),
                        }
                    )
                    for _ in range(2)
                ),
                "ln_f": nn.LayerNorm(dim),
            }
        )
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight
        self.apply(self.initialize)

    def initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=0.2)

    def forward(self, idx: Tensor) -> Tensor:
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer["wte"](idx) + self.transformer["wpe"](pos)
        for block in self.transformer["h"]:
            x = x + block["attn"](block["ln_1"](x))
            x = x + block["mlp"](block["ln_2"](x))
        return self.lm_head(self.transformer["ln_f"](x))
