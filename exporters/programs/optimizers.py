"""Optimizers as pure functions over named tensors, with PyTorch's definitions.

An optimizer lists the state it keeps for some parameters and computes new values of parameters and
state from their gradients. The learning rate is an input of every step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from device_agent.formats.manifest import TensorEntry
from exporters.programs.program import Tensors


class Optimizer(Protocol):
    """What a training step needs of an optimizer."""

    def state(self, parameters: Sequence[TensorEntry]) -> tuple[TensorEntry, ...]:
        """Entries of the state kept for `parameters`; it starts as zeros."""
        ...

    def update(
        self, parameters: Tensors, gradients: Tensors, state: Tensors, rate: Tensor
    ) -> dict[str, Tensor]:
        """New values of parameters and state, all by entry name."""
        ...


def entry(name: str, shape: tuple[int, ...]) -> TensorEntry:
    """One float32 tensor of optimizer state."""
    return TensorEntry(name=name, role="optimizer", dtype="float32", shape=shape, stored=False)


def twins(prefix: str, parameters: Sequence[TensorEntry]) -> tuple[TensorEntry, ...]:
    """One state tensor of the same shape for each parameter."""
    return tuple(entry(f"{prefix}:{p.name}", p.shape) for p in parameters)


@dataclass(frozen=True)
class SGD:
    """g = gradient + weight_decay * p; m' = momentum * m + g; p' = p - rate * m'.

    With `nesterov` the step is g + momentum * m' instead of m'. Parameters in `undecayed` have no
    weight decay.
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    undecayed: frozenset[str] = frozenset()

    def state(self, parameters: Sequence[TensorEntry]) -> tuple[TensorEntry, ...]:
        """One momentum tensor a parameter, none without momentum."""
        return twins("momentum", parameters) if self.momentum else ()

    def update(
        self, parameters: Tensors, gradients: Tensors, state: Tensors, rate: Tensor
    ) -> dict[str, Tensor]:
        """See the class."""
        new: dict[str, Tensor] = {}
        for name, value in parameters.items():
            step = gradients[name]
            if self.weight_decay and name not in self.undecayed:
                step = step + self.weight_decay * value
            if self.momentum:
                moment = self.momentum * state[f"momentum:{name}"] + step
                new[f"momentum:{name}"] = moment
                step = step + self.momentum * moment if self.nesterov else moment
            new[name] = value - rate * step
        return new


@dataclass(frozen=True)
class Adam:
    """Kingma and Ba's Adam: p' = p - rate * (m' / (1 - b1^t)) / (sqrt(v' / (1 - b2^t)) + eps).

    Weight decay adds weight_decay * p to the gradient; with `decoupled` (Loshchilov and Hutter's
    AdamW) it is rate * weight_decay * p off the parameter instead. Parameters in `undecayed` have
    none. `counter` names the number of steps: two in one program need two names.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    undecayed: frozenset[str] = frozenset()
    counter: str = "adam_steps"

    def state(self, parameters: Sequence[TensorEntry]) -> tuple[TensorEntry, ...]:
        """First and second moments, and the number of steps taken so far."""
        count = entry(self.counter, ())
        return (count, *twins("adam_m", parameters), *twins("adam_v", parameters))

    def update(
        self, parameters: Tensors, gradients: Tensors, state: Tensors, rate: Tensor
    ) -> dict[str, Tensor]:
        """See the class."""
        first, second = self.betas
        count = state[self.counter] + 1
        new: dict[str, Tensor] = {self.counter: count}
        mean_scale = rate / (1 - torch.pow(first, count))
        square_scale = 1 / (1 - torch.pow(second, count))
        for name, value in parameters.items():
            gradient, start = gradients[name], value
            if self.weight_decay and name not in self.undecayed:
                if self.decoupled:
                    start = value - rate * self.weight_decay * value
                else:
                    gradient = gradient + self.weight_decay * value
            mean = first * state[f"adam_m:{name}"] + (1 - first) * gradient
            square = second * state[f"adam_v:{name}"] + (1 - second) * gradient * gradient
            new[f"adam_m:{name}"], new[f"adam_v:{name}"] = mean, square
            new[name] = start - mean_scale * mean / (torch.sqrt(square * square_scale) + self.eps)
        return new


@dataclass(frozen=True)
class Proximal:
    """FedProx: `optimizer` on the objective plus strength / 2 * ||p - p_0||^2 (Li et al., eq. 2).

    p_0 are the parameters that the device received. They need not be kept: the distance from them,
    `moved`, is state that starts as zeros in every round, as an optimizer's does.
    """

    optimizer: Optimizer
    strength: float

    def state(self, parameters: Sequence[TensorEntry]) -> tuple[TensorEntry, ...]:
        """How far each parameter has moved, and the optimizer's own state."""
        return (*twins("moved", parameters), *self.optimizer.state(parameters))

    def update(
        self, parameters: Tensors, gradients: Tensors, state: Tensors, rate: Tensor
    ) -> dict[str, Tensor]:
        """See the class."""
        pulled = {n: g + self.strength * state[f"moved:{n}"] for n, g in gradients.items()}
        new = self.optimizer.update(parameters, pulled, state, rate)
        moved = {f"moved:{n}": state[f"moved:{n}"] + new[n] - p for n, p in parameters.items()}
        return {**new, **moved}


def select(tensors: Tensors, entries: Sequence[TensorEntry]) -> Mapping[str, Tensor]:
    """The tensors that `entries` name, in their order."""
    return {e.name: tensors[e.name] for e in entries}
