"""Models as their users write them, each with one construct that recording has to follow."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional


class Construct(NamedTuple):
    """A model, the shape of a sample, and the number of tokens if samples are tokens."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tokens: int | None = None
    formats: tuple[str, ...] = ("onnx", "tflite")


class Written(nn.Module):
    """A linear layer, what `forward` does with its result, and another linear layer."""

    def __init__(self, compute: Callable[[Tensor], Tensor], columns: int = 8) -> None:
        super().__init__()
        self.first, self.last, self.compute = nn.Linear(6, 8), nn.Linear(columns, 3), compute

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.compute(self.first(x)))


class ItemBiases(nn.Module):
    """A recommender: factors and a bias for each item."""

    def __init__(self) -> None:
        super().__init__()
        self.factors, self.biases = nn.Embedding(50, 4), nn.Parameter(torch.randn(50))
        self.last = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.factors(x).sum(-1) + self.biases[x])


class Unpooled(nn.Module):
    """What an autoencoder with indices of its maxima does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        largest, places = functional.max_pool1d(self.first(x)[:, None], 2, return_indices=True)
        return self.last(functional.max_unpool1d(largest, places, [2])[:, 0])


class StepsFirst(nn.Module):
    """An LSTM whose result is viewed, as optical character recognition does."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.last = nn.LSTM(4, 6, 2, bidirectional=True), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        y, (h, _) = self.rnn(x.permute(1, 0, 2))
        steps, samples, width = y.size()
        ends = h.view(2, 2, samples, 6)[-1].sum(0)
        return self.last(y.view(steps * samples, width)).view(steps, samples, -1)[-1] + ends[:, :3]


class Language(nn.Module):
    """A language model whose mask the caller does not call causal."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.embedded, self.last = nn.Embedding(20, 16), nn.Linear(16, 3)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))
        return self.last(self.body(self.embedded(x), mask=mask).mean(1))


class Queries(nn.Module):
    """Learned queries, decoded with a causal mask."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.first, self.queries = nn.Linear(3, 16), nn.Parameter(torch.randn(4, 16))
        self.last, self.whole = nn.Linear(16, 3), whole
        layer = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.body = (
            nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
            if whole
            else nn.TransformerDecoder(layer, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        queries = self.queries.expand(x.shape[0], -1, -1)
        mask = nn.Transformer.generate_square_subsequent_mask(4)
        inputs = (self.first(x), queries) if self.whole else (queries, self.first(x))
        return self.last(self.body(*inputs, tgt_mask=mask).mean(1))


class Neighbours(nn.Module):
    """The mean over the neighbours in a fixed graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.source = nn.Buffer(torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2]))
        self.target = nn.Buffer(torch.tensor([1, 1, 1, 2, 2, 5, 5, 8, 0, 3, 4, 6]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        sent = x[:, self.source]
        to = self.target[None, :, None].expand_as(sent)
        mean = torch.zeros_like(x).scatter_reduce(1, to, sent, "mean", include_self=False)
        return self.last(torch.relu(mean + x).mean(1))


def numpy_basis(x: Tensor) -> Tensor:
    """A basis in float64, as forecasting models compute it."""
    grid = np.linspace(0, 1, 8)
    basis = torch.tensor(np.stack([np.cos(i * grid) for i in range(8)])).float().to(x.dtype)
    return x @ basis + torch.arange(8, dtype=torch.float64).div(8).sin().float().to(x)


class SampleKernels(nn.Module):
    """A kernel for each sample, by patches."""

    def __init__(self) -> None:
        super().__init__()
        self.share, self.kernels = nn.Linear(2, 3), nn.Parameter(torch.randn(3, 4, 2, 3, 3))
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        _, channels, height, width = x.shape
        shares = torch.softmax(self.share(x.mean((2, 3))), 1)
        own = shares @ self.kernels.flatten(1)
        y = torch.bmm(own.view(-1, 4, channels * 9), functional.unfold(x, 3, padding=1))
        return self.last(y.view(-1, 4, height * width).relu().mean(2))


class Text(nn.Module):
    """The last real step of padded sequences."""

    def __init__(self, pack: Callable[..., Tensor] | None) -> None:
        super().__init__()
        self.embedded, self.last = nn.Embedding(30, 8, padding_idx=0), nn.Linear(12, 3)
        self.rnn, self.pack = nn.GRU(8, 12, batch_first=True), pack

    def forward(self, x: Tensor) -> Tensor:
        x = torch.where(torch.arange(9) < 1 + x[:, :1] % 9, x, 0)
        lengths = (x != 0).sum(1).clamp(min=1)
        if self.pack is not None:
            return self.last(self.pack(self.rnn, self.embedded(x), lengths))
        steps, _ = self.rnn(self.embedded(x))
        return self.last(steps[torch.arange(x.shape[0]), lengths - 1])


def packed_state(rnn: nn.GRU, x: Tensor, lengths: Tensor) -> Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return rnn(packed)[1][-1]


def packed_steps(rnn: nn.GRU, x: Tensor, lengths: Tensor) -> Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(
        x, lengths.cpu(), batch_first=True, enforce_sorted=False
    )
    packed = nn.utils.rnn.PackedSequence(packed.data.tanh(), *packed[1:])
    steps, _ = nn.utils.rnn.pad_packed_sequence(rnn(packed)[0], batch_first=True, total_length=9)
    return steps.mean(1)


def product_of_two(x: Tensor) -> Tensor:
    index = torch.arange(4).repeat_interleave(2).expand(x.shape[0], -1)
    places = torch.zeros(x.shape[0], 4).to(x)
    return places.scatter_add(1, index, x.sigmoid().log()).exp()


def turned(x: Tensor) -> Tensor:
    picture, angles = x.view(-1, 1, 2, 4), x[:, :6].view(-1, 2, 3)
    grid = functional.affine_grid(angles, list(picture.size()), align_corners=False)
    return functional.grid_sample(picture, grid, align_corners=False).flatten(1)


CONSTRUCTS = {
    "root mean square": Construct(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.RMSNorm(8), nn.Linear(8, 3)), (6,)
    ),
    "root mean square with its own eps": Construct(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.RMSNorm(8, eps=1e-3), nn.Linear(8, 3)), (6,)
    ),
    "quantile": Construct(lambda: Written(lambda x: x - x.quantile(0.5, 1, keepdim=True)), (6,)),
    "nanmean": Construct(lambda: Written(lambda x: x * x.nanmean(1, keepdim=True)), (6,)),
    "vector parameter by id": Construct(ItemBiases, (2,), tokens=50),
    "unpooling": Construct(Unpooled, (6,), formats=("onnx",)),
    "view of a recurrence": Construct(StepsFirst, (7, 4)),
    "mask of an encoder": Construct(Language, (6,), tokens=20),
    "mask of a decoder": Construct(lambda: Queries(whole=False), (5, 3)),
    "mask of a transformer": Construct(lambda: Queries(whole=True), (5, 3)),
    "mean of neighbours": Construct(Neighbours, (9, 4)),
    "patches by each sample's kernel": Construct(SampleKernels, (2, 5, 5)),
    "last real step": Construct(lambda: Text(None), (9,), tokens=30),
    "packed sequences": Construct(lambda: Text(packed_state), (9,), tokens=30),
    "packed and padded sequences": Construct(lambda: Text(packed_steps), (9,), tokens=30),
    "product by logarithms": Construct(lambda: Written(product_of_two, 4), (6,)),
    "spatial transformer": Construct(lambda: Written(turned), (6,)),
    "float64 constants": Construct(lambda: Written(numpy_basis), (6,)),
}
