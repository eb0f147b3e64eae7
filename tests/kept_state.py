"""Models that keep averages, counts or other tensors of their own while they train."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 3
WIDTH = 6


class OwnNorm(nn.Module):
    """A batch norm whose averages `update` writes, as people write it."""

    mean: Tensor
    var: Tensor

    def __init__(self, update: Callable[[nn.Module, Tensor, Tensor], None]) -> None:
        super().__init__()
        self.update = update
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            mean, var = x.mean(0), x.var(0)
            self.update(self, mean.detach(), var.detach())
            return (x - mean) / torch.sqrt(var + 1e-5)
        return (x - self.mean) / torch.sqrt(self.var + 1e-5)


def assigned(norm: Any, mean: Tensor, var: Tensor) -> None:
    norm.mean = 0.9 * norm.mean + 0.1 * mean
    norm.var = 0.9 * norm.var + 0.1 * var


def by_data(norm: Any, mean: Tensor, var: Tensor) -> None:
    norm.mean.data = 0.9 * norm.mean + 0.1 * mean
    norm.var.data.mul_(0.9).add_(0.1 * var)


def by_parts(norm: Any, mean: Tensor, var: Tensor) -> None:
    norm.mean[:2] = 0.9 * norm.mean[:2] + 0.1 * mean[:2]
    norm.mean[2:].lerp_(mean[2:], 0.3)
    torch.lerp(norm.var, var, 0.1, out=norm.var)


class Averaged(nn.Module):
    """Subtracts the average that it keeps, after this batch has entered it."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x - self.mean


class Codebook(nn.Module):
    """A quantizer whose codes are averages of what was assigned to them (VQ-VAE, appendix A.1)."""

    codes: Tensor
    sizes: Tensor
    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(5, WIDTH))
        self.register_buffer("sizes", torch.ones(5))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.codes).argmin(1)
        chosen = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                members = functional.one_hot(nearest, 5).type_as(x)
                self.sizes.mul_(0.9).add_(members.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(members.t() @ x, alpha=0.1)
                self.codes.copy_(self.sums / (self.sizes.unsqueeze(1) + 1e-5))
        return x + (chosen - x).detach()


class Annealed(nn.Module):
    """Counts its steps in a float, and reads the count."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return x * (1 + torch.exp(-0.1 * self.steps))


class Twins(nn.Module):
    """Two encoders; the second follows the first as an average of its weights (BYOL)."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            for online, target in zip(
                self.online.parameters(), self.target.parameters(), strict=True
            ):
                target.data = 0.9 * target.data + 0.1 * online.data
        with torch.no_grad():
            followed = self.target(x)
        return self.online(x) - followed


def between_layers(kept: nn.Module) -> nn.Sequential:
    """A model with `kept` between two layers."""
    return nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), kept, nn.Tanh(), nn.Linear(WIDTH, CLASSES))


def limited(limit: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return limit(nn.Linear(WIDTH, WIDTH))


KEEPING: dict[str, Callable[[], nn.Module]] = {
    "assigned averages": lambda: OwnNorm(assigned),
    "averages through data": lambda: OwnNorm(by_data),
    "averages by parts": lambda: OwnNorm(by_parts),
    "average that is read": Averaged,
    "codebook": Codebook,
    "count of steps": Annealed,
    "average of weights": Twins,
    "spectral norm": lambda: limited(nn.utils.parametrizations.spectral_norm),
    "spectral norm by a hook": lambda: limited(nn.utils.spectral_norm),
}


def averaged_model() -> nn.Module:
    return between_layers(OwnNorm(assigned))
