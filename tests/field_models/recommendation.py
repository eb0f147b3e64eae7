"""Recommendation: ids of users, items and fields, alone or beside numbers."""

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn


class NCF(nn.Module):
    """Neural collaborative filtering of pairs (user, item)."""

    def __init__(self, users: int = 20, items: int = 30, factors: int = 4) -> None:
        super().__init__()
        self.user_gmf, self.item_gmf = nn.Embedding(users, factors), nn.Embedding(items, factors)
        self.user_mlp, self.item_mlp = nn.Embedding(users, 8), nn.Embedding(items, 8)
        self.mlp = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 4))
        self.predict = nn.Linear(factors + 4, 1)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.1)

    def forward(self, pairs: Tensor) -> Tensor:
        user, item = pairs[:, 0], pairs[:, 1]
        gmf = self.user_gmf(user) * self.item_gmf(item)
        mlp = self.mlp(torch.cat([self.user_mlp(user), self.item_mlp(item)], dim=-1))
        return self.predict(torch.cat([gmf, mlp], dim=-1)).view(-1)


class TwoTower(nn.Module):
    """A user's last items against candidates."""

    def __init__(self, items: int = 40, dim: int = 8, history: int = 5) -> None:
        super().__init__()
        self.history = history
        self.items = nn.Embedding(items, dim, padding_idx=0)
        self.user_tower = nn.Sequential(nn.Linear(dim, 16), nn.GELU(), nn.Linear(16, dim))
        self.item_tower = nn.Sequential(nn.Linear(dim, 16), nn.GELU(), nn.Linear(16, dim))
        self.log_temperature = nn.Parameter(torch.tensor(np.log(1 / 0.2)).float())

    def forward(self, ids: Tensor) -> Tensor:
        history, candidates = ids[:, : self.history], ids[:, self.history :]
        mask = (history != 0).float().unsqueeze(-1)
        mean = (self.items(history) * mask).sum(1) / mask.sum(1).clamp(min=1.0)
        user = F.normalize(self.user_tower(mean), dim=-1)
        item = F.normalize(self.item_tower(self.items(candidates)), dim=-1)
        return torch.einsum("bd,bcd->bc", user, item) * self.log_temperature.exp()


class DeepFM(nn.Module):
    """A factorization machine and a perceptron over fields of categories."""

    def __init__(self, field_dims: tuple[int, ...] = (10, 7, 5, 12), dim: int = 4) -> None:
        super().__init__()
        self.offsets = np.array((0, *np.cumsum(field_dims)[:-1]), dtype=np.int64)
        self.embedding = nn.Embedding(sum(field_dims), dim)
        self.linear = nn.Embedding(sum(field_dims), 1)
        self.bias = nn.Parameter(torch.zeros((1,)))
        self.mlp = nn.Sequential(
            nn.Linear(len(field_dims) * dim, 16),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Dropout(p=0.2),
            nn.Linear(16, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + x.new_tensor(self.offsets).unsqueeze(0)
        e = self.embedding(x)
        square_of_sum = torch.sum(e, dim=1) ** 2
        sum_of_square = torch.sum(e**2, dim=1)
        fm = 0.5 * torch.sum(square_of_sum - sum_of_square, dim=1, keepdim=True)
        first = torch.sum(self.linear(x), dim=1) + self.bias
        return (first + fm + self.mlp(e.view(e.size(0), -1))).squeeze(1)


class DLRM(nn.Module):
    """Numbers in a bottom perceptron, categories in tables, products of all pairs."""

    def __init__(self, dense: int = 4, tables: tuple[int, ...] = (8, 5, 11), dim: int = 6) -> None:
        super().__init__()
        self.dense = dense
        self.bottom = nn.Sequential(nn.Linear(dense, 12), nn.ReLU(), nn.Linear(12, dim), nn.ReLU())
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, dim, mode="sum") for n in tables)
        vectors = len(tables) + 1
        self.top = nn.Sequential(
            nn.Linear(dim + vectors * (vectors - 1) // 2, 8), nn.ReLU(), nn.Linear(8, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        numbers, ids = x[:, : self.dense], x[:, self.dense :].long()
        numbers = torch.log1p(torch.relu(numbers))
        vectors = [self.bottom(numbers)]
        for i, table in enumerate(self.tables):
            vectors.append(table(ids[:, i : i + 1]))
        t = torch.stack(vectors, dim=1)
        z = torch.bmm(t, t.transpose(1, 2))
        n = t.shape[1]
        rows, columns = torch.tril_indices(n, n, offset=-1)
        return self.top(torch.cat([vectors[0], z[:, rows, columns]], dim=1))


class SASRec(nn.Module):
    """The next item of a session; 0 is padding."""

    def __init__(self, items: int = 30, max_len: int = 8, dim: int = 16) -> None:
        super().__init__()
        self.item = nn.Embedding(items + 1, dim, padding_idx=0)
        self.position = nn.Embedding(max_len, dim)
        self.dropout = nn.Dropout(0.2)
        self.attention_norms, self.attentions, self.forward_norms, self.forwards = (
            nn.ModuleList() for _ in range(4)
        )
        for _ in range(2):
            self.attention_norms.append(nn.LayerNorm(dim, eps=1e-8))
            self.attentions.append(nn.MultiheadAttention(dim, 2, 0.2))
            self.forward_norms.append(nn.LayerNorm(dim, eps=1e-8))
            self.forwards.append(
                nn.Sequential(nn.Conv1d(dim, dim, 1), nn.ReLU(), nn.Conv1d(dim, dim, 1))
            )
        self.last_norm = nn.LayerNorm(dim, eps=1e-8)

    def forward(self, log_seqs: Tensor) -> Tensor:
        seqs = self.item(log_seqs) * self.item.embedding_dim**0.5
        positions = torch.arange(log_seqs.shape[1], device=log_seqs.device)
        seqs = self.dropout(seqs + self.position(positions)[None])
        timeline_mask = log_seqs == 0
        seqs = seqs * ~timeline_mask.unsqueeze(-1)
        tl = seqs.shape[1]
        attention_mask = ~torch.tril(torch.ones((tl, tl), dtype=torch.bool, device=seqs.device))
        for i in range(len(self.attentions)):
            seqs = torch.transpose(seqs, 0, 1)
            q = self.attention_norms[i](seqs)
            outputs, _ = self.attentions[i](q, seqs, seqs, attn_mask=attention_mask)
            seqs = torch.transpose(q + outputs, 0, 1)
            seqs = self.forward_norms[i](seqs)
            seqs = seqs + self.forwards[i](seqs.transpose(-1, -2)).transpose(-1, -2)
            seqs = seqs * ~timeline_mask.unsqueeze(-1)
        return self.last_norm(seqs)[:, -1] @ self.item.weight.t()
