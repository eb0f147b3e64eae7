"""A test model with every supported kind of dropout."""

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 4


def dropped_branch(x: Tensor, training: bool) -> Tensor:
    """Stochastic depth as image libraries write it: a whole branch of a sample is dropped."""
    if not training:
        return x
    noise = torch.empty([x.shape[0], *[1] * (x.dim() - 1)], dtype=x.dtype, device=x.device)
    noise = noise.bernoulli_(0.6)
    noise.div_(0.6)
    return x * noise


def kept_paths(x: Tensor, training: bool) -> Tensor:
    """Stochastic depth as `transformers` writes it: a draw is the floor of a uniform number."""
    if not training:
        return x
    kept = 0.8 + torch.rand((x.shape[0], *[1] * (x.dim() - 1)), dtype=x.dtype, device=x.device)
    kept.floor_()
    return x.div(0.8) * kept


def attended(x: Tensor, training: bool) -> Tensor:
    """Attention to the positions of a sample, or to none if its first channel is negative."""
    seen = (x[..., 0].mean(1) > 0)[:, None, None, None].expand(-1, 1, 1, x.shape[1])
    heads = x[:, None]
    rate = 0.3 if training else 0.0
    return functional.scaled_dot_product_attention(heads, heads, heads, seen, rate)[:, 0]


class Dropping(nn.Module):
    """Dropout of elements, of channels, of attention weights and of whole branches."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 8, 3, padding=1)
        self.channels = nn.Dropout2d(0.3)
        self.layer = nn.TransformerEncoderLayer(
            8, 2, 12, dropout=0.2, batch_first=True, activation="gelu"
        )
        self.branch = nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.channels(torch.tanh(self.conv(x)))
        x = self.layer(x.flatten(2).transpose(1, 2))
        y = self.branch(x) + attended(x, self.training)
        # As attention in transformers: one copy that only training records.
        y = y.contiguous() if self.training else y
        x = kept_paths(x + dropped_branch(y, self.training), self.training).mean(1)
        return self.head(functional.dropout(x, 0.5, self.training))


SHAPE = (2, 4, 5)
