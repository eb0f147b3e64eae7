"""DP-SGD in plain PyTorch: a loop over the samples of each batch, in float64."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from exporters.recording.shared_tensors import twin_of

Loss = Callable[[Tensor, Tensor], Tensor]
Optimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def private_steps(
    model: nn.Module,
    samples: tuple[np.ndarray, np.ndarray],
    loss: Loss,
    optimizer: Optimizer,
    batches: Sequence[tuple[np.ndarray, dict[str, np.ndarray]]],
    clip: float,
    deviation: float,
    batch_size: int,
) -> dict[str, np.ndarray]:
    """The parameters after a step on each of `batches`: sample indices, and normal numbers."""
    model, (x, y) = twin_of(model).double(), samples
    named = dict(model.named_parameters())
    stepping = optimizer(list(named.values()))
    torch.set_default_dtype(torch.float64)  # constants of `forward` too
    try:
        for indices, normal in batches:
            sums = {n: torch.zeros_like(p) for n, p in named.items()}
            for i in indices:
                one = torch.from_numpy(x[i : i + 1])
                output = model(one.double() if one.is_floating_point() else one)
                label = torch.from_numpy(y[i : i + 1])
                model.zero_grad()
                loss(output, label.double() if label.is_floating_point() else label).backward()
                found = {n: p.grad for n, p in named.items() if p.grad is not None}
                norm = math.sqrt(sum(float(g.square().sum()) for g in found.values()))
                for name, gradient in found.items():
                    sums[name] += gradient * min(1.0, clip / norm)
            for name, parameter in named.items():
                noise = deviation * torch.from_numpy(normal[name])
                parameter.grad = (sums[name] + noise) / batch_size
            stepping.step()
    finally:
        torch.set_default_dtype(torch.float32)
    return {name: parameter.detach().numpy() for name, parameter in named.items()}
