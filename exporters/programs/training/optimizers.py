"""Optimizers as pure functions of named tensors, with PyTorch's definitions.

An optimizer lists the state that it needs for given parameters. From the gradients, it computes new
parameters and new state. The learning rate is an input of every step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from device_agent.formats.manifest import TensorEntry
from exporters.programs.program import Tensors


class Optimizer(Protocol):
    """The interface that a training step uses."""

    @property
    def scaled(self) -> bool:
        """Whether `update` takes gradients that are multiplied by the learning rate.

        Such gradients need no additional work: if the step multiplies the loss by the rate, all
        gradients are also multiplied.
        """
        ...

    def state(self, parameters: Sequence[TensorEntry]) -> tuple[TensorEntry, ...]:
        """Entries of the state that is kept for `parameters`. All state starts as zeros."""
        ...

    def update(
        self, parameters: Tensors, gradients: Tensors, state: Tensors, rate: Tensor
    ) -> dict[str, Tensor]:
        """Compute one step.

        Args:
            parameters: Trained parameters by name.
            gradients: The gradients of the parameters, by the same names. If `scaled` is true, they
                are multiplied by `rate`.
            state: The optimizer's state, by the names of its entries.
            rate: The learning rate, a scalar.

        Returns:
            New values of all parameters and all state, by name.
        """
        ...


def state_entry(name: str, shape: tuple[int, ...]) -> TensorEntry:
    """Entry of one float32 tensor of optimizer state. This tensor is not stored in the bundle."""
    return TensorEntry(name=name, role="optimizer", dtype="float32", shape=shape, stored=False)


def entries_like(prefix: str, parameters: Sequence[TensorEntry]) -> tuple[TensorEntry, ...]:
    """One state entry for each parameter, of the same shape, called `prefix:parameter`."""
    return tuple(state_entry(f"{prefix}:{p.name}", p.shape) for p in parameters)


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent, as in torch.optim.SGD.

    g = gradient + weight_decay * p; v' = momentum * v + rate * g; p' = p - v'. PyTorch stores m = v
    / rate instead. If the rate is constant, both give the same parameters. The rate is constant
    within a round, and state starts as zeros in every round. Storing v saves the memory of the
    product rate * m.

    Attributes:
        momentum: Momentum factor. If it is 0, there is no state.
        nesterov: Use rate * g + momentum * v' as the step instead of v'.
        weight_decay: The parameter times this factor is added to its gradient.
        undecayed: Names of parameters without weight decay.
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    undecayed: frozenset[str] = frozenset()
    scaled: ClassVar[bool] = True

    def state(self, parameters: Sequence[TensorEntry]) -> tuple[TensorEntry, ...]:
        """One momentum tensor for each parameter. Empty without momentum."""
        return entries_like("momentum", parameters) if self.momentum else ()

    def update(
        self, parameters: Tensors, gradients: Tensors, state: Tensors, rate: Tensor
    ) -> dict[str, Tensor]:
        """Apply the formula of the class; see `Optimizer.update`."""
        new: dict[str, Tensor] = {}
        decay = rate * self.weight_decay
        for name, value in parameters.items():
            step = gradients[name]
            decayed = decay * value if self.weight_decay and name not in self.undecayed else None
            if self.momentum:
                # In this order, the matrix product that computes a gradient can add the velocity.
                velocity = self.momentum * state[f"momentum:{name}"] + step
                velocity = velocity if decayed is None else velocity + decayed
                new[f"momentum:{name}"] = velocity
            if self.momentum and not self.nesterov:
                step = velocity
            else:
                step = step if decayed is None else step + decayed
                step = step + self.momentum * velocity if self.nesterov else step
            new[name] = value - step
        return new


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba) and AdamW (Loshchilov and Hutter), as in torch.optim.

    p' = p - rate * (m' / (1 - b1^t)) / (sqrt(v' / (1 - b2^t)) + eps).

    Attributes:
        betas: b1 and b2, the decay rates of the moments m and v.
        eps: Added to the denominator.
        weight_decay: Strength of the weight decay.
        decoupled: Subtract rate * weight_decay * p from the parameter (AdamW) instead of adding
            weight_decay * p to the gradient.
        undecayed: Names of parameters without weight decay.
        counter: Name of the state tensor that counts steps. Two Adam optimizers in one program need
            different names.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    undecayed: frozenset[str] = frozenset()
    counter: str = "adam_steps"
    scaled: ClassVar[bool] = False

    def state(self, parameters: Sequence[TensorEntry]) -> tuple[TensorEntry, ...]:
        """The number of steps so far, and the first and second moment of each parameter."""
        count = state_entry(self.counter, ())
        return (count, *entries_like("adam_m", parameters), *entries_like("adam_v", parameters))

    def update(
        self, parameters: Tensors, gradients: Tensors, state: Tensors, rate: Tensor
    ) -> dict[str, Tensor]:
        """Apply the formula of the class; see `Optimizer.update`."""
        first, second = self.betas
        # A float32 count is exact up to 2^24 steps.
        count = state[self.counter] + 1
        new: dict[str, Tensor] = {self.counter: count}
        # Computed once as scalars, so that only two factors remain for each parameter tensor.
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
    """FedProx (Li et al., eq. 2): `optimizer` minimises the loss plus strength / 2 * ||p - p_0||^2.

    p_0 are the parameters that the device received. The state does not contain p_0 but the
    difference p - p_0 (`moved`). Like all optimizer state, it starts as zeros in every round.

    Attributes:
        optimizer: The inner optimizer.
        strength: Factor of the penalty (mu in the paper).
    """

    optimizer: Optimizer
    strength: float

    @property
    def scaled(self) -> bool:
        """Whether the inner optimizer takes gradients that are multiplied by the rate."""
        return self.optimizer.scaled

    def state(self, parameters: Sequence[TensorEntry]) -> tuple[TensorEntry, ...]:
        """The distance p - p_0 of each parameter, and the state of the inner optimizer."""
        return (*entries_like("moved", parameters), *self.optimizer.state(parameters))

    def update(
        self, parameters: Tensors, gradients: Tensors, state: Tensors, rate: Tensor
    ) -> dict[str, Tensor]:
        """Step the inner optimizer on the gradients plus strength * (p - p_0)."""
        strength = self.strength * rate if self.scaled else self.strength
        pulled = {n: g + strength * state[f"moved:{n}"] for n, g in gradients.items()}
        new = self.optimizer.update(parameters, pulled, state, rate)
        moved = {f"moved:{n}": state[f"moved:{n}"] + new[n] - p for n, p in parameters.items()}
        return {**new, **moved}


def moved_state(state: Tensors, before: Tensors, after: Tensors) -> Tensors:
    """The `state` of an optimizer whose parameters the model itself changes before a step.

    A proximal step includes such a change in the distance from the received parameters.
    """
    changed = {f"moved:{name}": name for name, value in after.items() if value is not before[name]}
    return {
        key: value + after[changed[key]] - before[changed[key]] if key in changed else value
        for key, value in state.items()
    }


def select(tensors: Tensors, entries: Sequence[TensorEntry]) -> Mapping[str, Tensor]:
    """Select tensors by their entries.

    Args:
        tensors: Tensors by name.
        entries: Entries of the wanted tensors.

    Returns:
        The wanted tensors by name, in the order of `entries`.
    """
    return {e.name: tensors[e.name] for e in entries}
