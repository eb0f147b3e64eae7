"""Sets, pairs and sequences of tokens."""

import math

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence


class DeepSets(nn.Module):
    def __init__(self, inputs: int = 3, hidden: int = 12, classes: int = 4) -> None:
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(inputs, hidden), nn.ELU(), nn.Linear(hidden, hidden))
        self.rho = nn.Sequential(
            nn.Linear(2 * hidden, hidden), nn.ELU(), nn.Linear(hidden, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.phi(x)
        return self.rho(torch.cat([h.mean(dim=1), torch.logsumexp(h, dim=1)], dim=-1))


class MAB(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.dim, self.heads = dim, heads
        self.fc_q, self.fc_k, self.fc_v, self.fc_o = (nn.Linear(dim, dim) for _ in range(4))
        self.ln0, self.ln1 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        q, k, v = self.fc_q(query), self.fc_k(key), self.fc_v(key)
        split = self.dim // self.heads
        q_ = torch.cat(q.split(split, 2), 0)
        k_ = torch.cat(k.split(split, 2), 0)
        v_ = torch.cat(v.split(split, 2), 0)
        a = torch.softmax(q_.bmm(k_.transpose(1, 2)) / math.sqrt(self.dim), 2)
        o = torch.cat((q_ + a.bmm(v_)).split(q.size(0), 0), 2)
        o = self.ln0(o)
        return self.ln1(o + F.relu(self.fc_o(o)))


class SetTransformer(nn.Module):
    """Induced points, and a seed that pools the set."""

    def __init__(self, inputs: int = 3, dim: int = 8, classes: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(inputs, dim)
        self.induced = nn.Parameter(torch.Tensor(1, 3, dim))
        self.seed = nn.Parameter(torch.Tensor(1, 1, dim))
        nn.init.xavier_uniform_(self.induced)
        nn.init.xavier_uniform_(self.seed)
        self.mab0, self.mab1, self.pma = MAB(dim, 2), MAB(dim, 2), MAB(dim, 2)
        self.dec = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        h = self.mab0(self.induced.repeat(x.size(0), 1, 1), x)
        x = self.mab1(x, h)
        return self.dec(self.pma(self.seed.repeat(x.size(0), 1, 1), x)).squeeze(1)


class Siamese(nn.Module):
    """Whether two pictures, which lie in two channels, show the same."""

    def __init__(self) -> None:
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3), nn.ReLU()
        )
        self.fc = nn.Sequential(nn.Linear(8 * 3 * 3, 12), nn.Sigmoid())
        self.out = nn.Linear(12, 1)

    def embed(self, x: Tensor) -> Tensor:
        x = self.cnn(x)
        return self.fc(x.view(x.size()[0], -1))

    def forward(self, pair: Tensor) -> Tensor:
        left, right = torch.chunk(pair, 2, dim=1)
        return self.out(torch.abs(self.embed(left) - self.embed(right)))


class TextClassifier(nn.Module):
    """A transformer with a padding mask, and the mean over real tokens."""

    def __init__(self, vocab: int = 30, dim: int = 16, classes: int = 4, max_len: int = 10) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim, padding_idx=0)
        self.positions = nn.Parameter(torch.zeros(1, max_len, dim))
        layer = nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2)
        self.fc = nn.Linear(dim, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens.eq(0)
        x = self.embedding(tokens) * math.sqrt(self.embedding.embedding_dim) + self.positions
        x = self.encoder(x, src_key_padding_mask=padding)
        x = x.masked_fill(padding.unsqueeze(-1), 0.0)
        lengths = (~padding).sum(dim=1, keepdim=True).clamp(min=1)
        return self.fc(x.sum(dim=1) / lengths)


class Translator(nn.Module):
    """nn.Transformer of source and shifted target, which lie in one row."""

    def __init__(self, vocab: int = 20, dim: int = 16, source: int = 6) -> None:
        super().__init__()
        self.source = source
        self.src_embed, self.tgt_embed = nn.Embedding(vocab, dim), nn.Embedding(vocab, dim)
        self.transformer = nn.Transformer(
            dim, 2, 1, 1, dim_feedforward=24, dropout=0.1, batch_first=True
        )
        self.generator = nn.Linear(dim, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        src, tgt = tokens[:, : self.source], tokens[:, self.source :]
        tgt_mask = self.transformer.generate_square_subsequent_mask(tgt.size(1)).to(tokens.device)
        out = self.transformer(self.src_embed(src), self.tgt_embed(tgt), tgt_mask=tgt_mask)
        return self.generator(out)


class PackedLSTM(nn.Module):
    """A tagger of sentences of different lengths."""

    def __init__(self, vocab: int = 30, dim: int = 8, hidden: int = 6, tags: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim, padding_idx=0)
        self.lstm = nn.LSTM(dim, hidden, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(2 * hidden, tags)

    def forward(self, text: Tensor) -> Tensor:
        lengths = (text != 0).sum(dim=1).clamp(min=1).cpu()
        packed = pack_padded_sequence(
            self.embedding(text), lengths, batch_first=True, enforce_sorted=False
        )
        _, (hidden, _) = self.lstm(packed)
        return self.fc(torch.cat((hidden[-2], hidden[-1]), dim=1))


class PointNet(nn.Module):
    """Classes of clouds of points, with a learned alignment."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.tconv, self.tfc = nn.Conv1d(3, 8, 1), nn.Linear(8, 9)
        self.conv1, self.bn1 = nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8)
        self.conv2, self.bn2 = nn.Conv1d(8, 16, 1), nn.BatchNorm1d(16)
        self.fc = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        batch = x.size()[0]
        t = self.tfc(torch.max(F.relu(self.tconv(x)), 2, keepdim=False)[0])
        identity = torch.eye(3, device=x.device, dtype=x.dtype).view(1, 9).repeat(batch, 1)
        t = (t + identity).view(-1, 3, 3)
        x = torch.bmm(x.transpose(2, 1), t).transpose(2, 1)
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        x = torch.max(x, 2, keepdim=True)[0]
        return self.fc(x.view(-1, 16))
