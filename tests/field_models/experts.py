"""Mixtures of experts, hypernetworks, capsules and splines."""

import itertools

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn


class SoftMoE(nn.Module):
    """Every slot of every expert takes a mixture of all tokens."""

    def __init__(self, dim: int = 12, experts: int = 3, slots: int = 2, classes: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(6, dim)
        self.phi = nn.Parameter(torch.randn(dim, experts, slots) * dim**-0.5)
        self.scale = nn.Parameter(torch.ones(1))
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 16), nn.GELU(), nn.Linear(16, dim)) for _ in range(experts)
        )
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        logits = torch.einsum(
            "bmd,dnp->bmnp", F.normalize(x, dim=2), self.scale * F.normalize(self.phi, dim=0)
        )
        dispatch = logits.softmax(dim=1)
        combine = logits.flatten(2).softmax(dim=2).view_as(logits)
        slots = torch.einsum("bmd,bmnp->bnpd", x, dispatch)
        out = torch.stack([f(slots[:, i]) for i, f in enumerate(self.experts)], dim=1)
        return self.head(torch.einsum("bnpd,bmnp->bmd", out, combine).mean(1))


class TopKMoE(nn.Module):
    """Two of four experts for each token; all compute, a gate of zeros leaves the others out."""

    def __init__(self, dim: int = 12, experts: int = 4, k: int = 2, classes: int = 4) -> None:
        super().__init__()
        self.k, self.n = k, experts
        self.embed = nn.Linear(6, dim)
        self.gate = nn.Linear(dim, experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(experts, dim, 16) * 0.2)
        self.w2 = nn.Parameter(torch.randn(experts, 16, dim) * 0.2)
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        scores, chosen = self.gate(x).topk(self.k, dim=-1)
        weights = scores.softmax(dim=-1)
        mask = F.one_hot(chosen, self.n).to(x.dtype)
        gates = (mask * weights.unsqueeze(-1)).sum(dim=2)
        hidden = F.silu(torch.einsum("btd,edh->bteh", x, self.w1))
        out = torch.einsum("bteh,ehd->bted", hidden, self.w2)
        x = x + torch.einsum("bted,bte->btd", out, gates)
        return self.head(x.mean(dim=1))


class Hypernetwork(nn.Module):
    """A network whose weights another network writes from the context of each sample."""

    def __init__(self, context: int = 4, features: int = 6, hidden: int = 8) -> None:
        super().__init__()
        self.context, self.features, self.hidden = context, features, hidden
        self.sizes = [features * hidden, hidden, hidden, 1]
        self.hyper = nn.Sequential(
            nn.Linear(context, 16), nn.Tanh(), nn.Linear(16, sum(self.sizes))
        )

    def forward(self, x: Tensor) -> Tensor:
        context, data = x.split([self.context, self.features], dim=1)
        w1, b1, w2, b2 = self.hyper(context).split(self.sizes, dim=1)
        h = torch.bmm(data.unsqueeze(1), w1.view(-1, self.features, self.hidden)).squeeze(1)
        h = torch.tanh(h + b1)
        return (h * w2).sum(dim=1, keepdim=True) + b2


def squash(s: Tensor, dim: int = -1) -> Tensor:
    norm = torch.sum(s**2, dim=dim, keepdim=True)
    return norm / (1 + norm) * s / (torch.sqrt(norm) + 1e-8)


class CapsuleNet(nn.Module):
    """Primary capsules and digit capsules with dynamic routing."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 5)
        self.primary = nn.Conv2d(8, 8, 3, stride=2)
        self.capsules = 2 * 3 * 3
        self.W = nn.Parameter(0.1 * torch.randn(1, self.capsules, classes, 6, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x))
        u = self.primary(x)
        u = squash(u.view(u.size(0), 2, 4, -1).transpose(2, 3).reshape(u.size(0), -1, 4))
        u_hat = torch.matmul(self.W, u[:, :, None, :, None]).squeeze(-1)
        b = torch.zeros(*u_hat.shape[:3], 1, device=x.device, dtype=x.dtype)
        for i in range(3):
            c = F.softmax(b, dim=2)
            v = squash((c * u_hat).sum(dim=1))
            if i < 2:
                b = b + (u_hat.detach() * v.unsqueeze(1).detach()).sum(dim=-1, keepdim=True)
        return torch.sqrt((v**2).sum(dim=-1) + 1e-9)


class KANLinear(nn.Module):
    """B-splines of degree 3 on a fixed grid, and a base function."""

    def __init__(self, inputs: int, outputs: int, grid_size: int = 4, order: int = 3) -> None:
        super().__init__()
        self.order = order
        h = 2 / grid_size
        grid = torch.arange(-order, grid_size + order + 1) * h - 1
        self.register_buffer("grid", grid.expand(inputs, -1).contiguous())
        self.base_weight = nn.Parameter(torch.randn(outputs, inputs) * 0.3)
        self.spline_weight = nn.Parameter(torch.randn(outputs, inputs, grid_size + order) * 0.1)

    def b_splines(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(-1)
        grid = self.grid
        bases = ((x >= grid[:, :-1]) & (x < grid[:, 1:])).to(x.dtype)
        for k in range(1, self.order + 1):
            left = (x - grid[:, : -(k + 1)]) / (grid[:, k:-1] - grid[:, : -(k + 1)])
            right = (grid[:, k + 1 :] - x) / (grid[:, k + 1 :] - grid[:, 1:(-k)])
            bases = left * bases[:, :, :-1] + right * bases[:, :, 1:]
        return bases.contiguous()

    def forward(self, x: Tensor) -> Tensor:
        base = F.linear(F.silu(x), self.base_weight)
        spline = F.linear(self.b_splines(x).view(x.size(0), -1), self.spline_weight.flatten(1))
        return base + spline


class KAN(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (5, 6, 3)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(KANLinear(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x
