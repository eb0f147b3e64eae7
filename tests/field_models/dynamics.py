"""Spiking networks, implicit layers and ordinary differential equations."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class SurrogateSpike(torch.autograd.Function):
    """A step forward, the derivative of a fast sigmoid backward."""

    @staticmethod
    def forward(ctx: Any, membrane: Tensor) -> Tensor:
        ctx.save_for_backward(membrane)
        return (membrane > 0).to(membrane.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (membrane,) = ctx.saved_tensors
        return grad_output / (10.0 * torch.abs(membrane) + 1.0) ** 2


class SpikingNet(nn.Module):
    """Leaky integrate-and-fire neurons over time steps."""

    def __init__(self, inputs: int = 6, hidden: int = 10, classes: int = 3) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(inputs, hidden), nn.Linear(hidden, classes)
        self.beta = nn.Parameter(torch.tensor(0.9))
        self.spike = SurrogateSpike.apply

    def forward(self, x: Tensor) -> Tensor:
        batch, steps, _ = x.shape
        mem1 = torch.zeros(batch, self.fc1.out_features, device=x.device, dtype=x.dtype)
        mem2 = torch.zeros(batch, self.fc2.out_features, device=x.device, dtype=x.dtype)
        record = []
        for t in range(steps):
            mem1 = self.beta * mem1 + self.fc1(x[:, t])
            spikes = self.spike(mem1 - 1.0)
            mem1 = mem1 - spikes.detach()
            mem2 = self.beta * mem2 + self.fc2(spikes)
            record.append(mem2)
        return torch.stack(record, dim=0).max(dim=0)[0]


class DEQ(nn.Module):
    """The fixed point of a layer, by iterations without gradient and one with it."""

    def __init__(self, inputs: int = 6, hidden: int = 10, classes: int = 3) -> None:
        super().__init__()
        self.inject = nn.Linear(inputs, hidden)
        self.cell = nn.Linear(hidden, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.fc = nn.Linear(hidden, classes)
        nn.init.normal_(self.cell.weight, std=0.05)

    def f(self, z: Tensor, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.cell(z) + x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inject(x)
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(12):
                z = self.f(z, x)
        z = self.f(z, x)
        return self.fc(z)


def rk4(f: Callable[[Tensor, Tensor], Tensor], y: Tensor, t: Tensor) -> Tensor:
    for i in range(len(t) - 1):
        h = t[i + 1] - t[i]
        k1 = f(t[i], y)
        k2 = f(t[i] + h / 2, y + h / 2 * k1)
        k3 = f(t[i] + h / 2, y + h / 2 * k2)
        k4 = f(t[i + 1], y + h * k3)
        y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return y


class ODEFunction(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim + 1, 12), nn.Softplus(), nn.Linear(12, dim))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(torch.cat([y, torch.ones_like(y[:, :1]) * t], dim=1))


class NeuralODE(nn.Module):
    def __init__(self, features: int = 5, dim: int = 6, classes: int = 3) -> None:
        super().__init__()
        self.lift, self.fc = nn.Linear(features, dim), nn.Linear(dim, classes)
        self.odefunc = ODEFunction(dim)
        self.register_buffer("times", torch.linspace(0, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(rk4(self.odefunc, self.lift(x), self.times))
