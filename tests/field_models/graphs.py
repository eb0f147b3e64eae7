"""Graphs: a fixed graph of sensors, or an adjacency in each sample."""

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn

EDGES = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 0), (0, 3), (2, 6), (6, 1)]


class GraphConvolution(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        return torch.matmul(adj, torch.matmul(x, self.weight)) + self.bias


class GCN(nn.Module):
    """Each sample holds the adjacency of a molecule beside the features of its atoms."""

    def __init__(self, nodes: int = 7, features: int = 5, classes: int = 3) -> None:
        super().__init__()
        self.nodes = nodes
        self.gc1, self.gc2 = GraphConvolution(features, 12), GraphConvolution(12, 12)
        self.fc = nn.Linear(12, classes)

    def forward(self, x: Tensor) -> Tensor:
        adj, h = x[..., : self.nodes], x[..., self.nodes :]
        adj = (adj + adj.transpose(1, 2) > 0).float() + torch.eye(self.nodes, device=x.device)
        adj = adj.clamp(max=1.0).to(h.dtype)
        degree = adj.sum(-1).pow(-0.5)
        adj = degree.unsqueeze(-1) * adj * degree.unsqueeze(-2)
        h = F.relu(self.gc1(h, adj))
        h = F.dropout(h, 0.2, training=self.training)
        h = self.gc2(h, adj)
        return self.fc(h.sum(dim=1))


class GraphAttentionLayer(nn.Module):
    def __init__(self, inputs: int, outputs: int, concat: bool) -> None:
        super().__init__()
        self.concat = concat
        self.W = nn.Parameter(torch.empty(size=(inputs, outputs)))
        nn.init.xavier_uniform_(self.W.data, gain=1.414)
        self.a = nn.Parameter(torch.empty(size=(2 * outputs, 1)))
        nn.init.xavier_uniform_(self.a.data, gain=1.414)
        self.outputs = outputs

    def forward(self, h: Tensor, adj: Tensor) -> Tensor:
        wh = torch.matmul(h, self.W)
        source = torch.matmul(wh, self.a[: self.outputs, :])
        target = torch.matmul(wh, self.a[self.outputs :, :])
        e = F.leaky_relu(source + target.mT, 0.2)
        attention = torch.where(adj > 0, e, -9e15 * torch.ones_like(e))
        out = torch.matmul(F.softmax(attention, dim=-1), wh)
        return F.elu(out) if self.concat else out


class GAT(nn.Module):
    """A label for every sensor of a fixed graph."""

    def __init__(self, features: int = 4, classes: int = 3, heads: int = 2) -> None:
        super().__init__()
        adj = torch.eye(7)
        for a, b in EDGES:
            adj[a, b] = adj[b, a] = 1
        self.register_buffer("adj", adj)
        self.attentions = [GraphAttentionLayer(features, 6, True) for _ in range(heads)]
        for i, attention in enumerate(self.attentions):
            self.add_module(f"attention_{i}", attention)
        self.out_att = GraphAttentionLayer(6 * heads, classes, False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([att(x, self.adj) for att in self.attentions], dim=-1)
        return self.out_att(x, self.adj)


class MPNN(nn.Module):
    """Messages of an edge network, summed by index_add, and a GRU cell that updates the nodes."""

    def __init__(self, features: int = 4, dim: int = 8, classes: int = 3) -> None:
        super().__init__()
        edges = torch.tensor(EDGES + [(b, a) for a, b in EDGES]).t().contiguous()
        self.register_buffer("edge_index", edges)
        self.embed = nn.Linear(features, dim)
        self.message = nn.Sequential(nn.Linear(2 * dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.update = nn.GRUCell(dim, dim)
        self.readout = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        source, target = self.edge_index
        for _ in range(2):
            m = self.message(torch.cat([h[:, source], h[:, target]], dim=-1))
            total = torch.zeros_like(h).index_add(1, target, m)
            b, n, d = h.shape
            h = self.update(total.reshape(b * n, d), h.reshape(b * n, d)).view(b, n, d)
        return self.readout(h.mean(1))


class GraphSAGE(nn.Module):
    """Means of neighbours by scatter_add and counts."""

    def __init__(self, features: int = 4, dim: int = 8, classes: int = 3) -> None:
        super().__init__()
        edges = torch.tensor(EDGES + [(b, a) for a, b in EDGES])
        self.register_buffer("source", edges[:, 0])
        self.register_buffer("target", edges[:, 1])
        self.own = nn.ModuleList([nn.Linear(features, dim), nn.Linear(dim, dim)])
        self.neighbours = nn.ModuleList([nn.Linear(features, dim), nn.Linear(dim, dim)])
        self.fc = nn.Linear(dim, classes)

    def mean(self, x: Tensor) -> Tensor:
        messages = x[:, self.source]
        index = self.target.view(1, -1, 1).expand_as(messages)
        total = torch.zeros_like(x).scatter_add_(1, index, messages)
        count = torch.bincount(self.target, minlength=x.size(1)).clamp(min=1)
        return total / count.view(1, -1, 1)

    def forward(self, x: Tensor) -> Tensor:
        for own, neighbours in zip(self.own, self.neighbours, strict=True):
            x = F.normalize(F.relu(own(x) + neighbours(self.mean(x))), dim=-1)
        return self.fc(x.amax(dim=1))
