"""Reference implementation of federated rounds in plain PyTorch, in float64.

It imports nothing of the project. Models are `nn.Sequential`; a state maps the model's own tensor
names to float64 tensors.
"""

import copy
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

State = dict[str, Tensor]


@dataclass(frozen=True)
class Plan:
    """The training options of a device."""

    batch_size: int
    epochs: int
    rate: float
    momentum: float
    weight_decay: float
    steps: int | None = None
    """With it, batches of as many epochs as they take."""


@dataclass(frozen=True)
class Device:
    """The samples of one device and the seed of their order."""

    x: np.ndarray
    y: np.ndarray
    seed: int

    def visits(self, plan: Plan) -> Iterator[tuple[Tensor, np.ndarray]]:
        """Labels and sample indices of every batch in every epoch, or of the first `steps`."""

        def every() -> Iterator[np.ndarray]:
            for epoch in range(plan.epochs) if plan.steps is None else itertools.count():
                yield from batches_of(len(self.y), plan.batch_size, self.seed, epoch)

        for indices in itertools.islice(every(), plan.steps):
            yield torch.from_numpy(self.y[indices]), indices


def batches_of(samples: int, size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """The batches of an epoch, as docs/reference/bundle.md defines them."""
    order = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
    waiting = order.permutation(samples).tolist()
    groups = []
    while waiting:
        taken = size + 1 if len(waiting) == size + 1 else size
        groups.append(np.array(waiting[:taken]))
        waiting = waiting[taken:]
    return groups


def samples(device: Device, dtype: torch.dtype) -> Tensor:
    """The device's samples in `dtype`; tokens stay integers."""
    x = torch.from_numpy(device.x)
    return x.to(dtype) if x.is_floating_point() else x


def cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    """PyTorch's own; of a sequence it wants (batch, n, t), while models return (batch, t, n).

    Models of transformers return an object with `logits`.
    """
    output = getattr(output, "logits", output)
    return functional.cross_entropy(output.movedim(-1, 1) if output.dim() == 3 else output, y)


def state_of(model: nn.Module) -> State:
    """Copies of a model's parameters and statistics, without integer batch counters."""
    return {
        name: value.detach().double().clone()
        for name, value in model.state_dict().items()
        if value.is_floating_point()
    }


def assert_trained(came: Mapping[str, np.ndarray], expected: State, old: State) -> None:
    """Whether a training in float32 ended where the one in float64 did, from the state `old`.

    Rounding is relative to the change of a tensor, and to the tensor itself.
    """
    for name, value in expected.items():
        difference = float((torch.from_numpy(came[name]).double() - value).norm())
        change = float((value - old[name]).norm())
        assert difference <= 1e-3 * change + 5e-7 * float(value.norm()), name


def mean(updates: Sequence[tuple[Mapping[str, Tensor], float]], old: State) -> State:
    """Weighted average of each tensor over the updates that hold it; the old one if none does."""
    new = dict(old)
    for name in old:
        held = [(u[name].numpy(), weight) for u, weight in updates if name in u]
        if held:
            values, weights = zip(*held, strict=True)
            new[name] = torch.from_numpy(np.average(np.stack(values), axis=0, weights=weights))
    return new


def sgd(groups: Sequence[dict[str, object]], plan: Plan, nesterov: bool = False) -> torch.optim.SGD:
    return torch.optim.SGD(
        groups,
        lr=plan.rate,
        momentum=plan.momentum,
        weight_decay=plan.weight_decay,
        nesterov=nesterov,
    )


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """One step of `optimizer` down the gradient of `loss`."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train_full(
    model: nn.Module, device: Device, plan: Plan, dtype: torch.dtype = torch.float64
) -> State:
    """FedAvg: local training of all parameters."""
    model = copy.deepcopy(model).to(dtype).train()
    x = samples(device, dtype)
    optimizer = sgd([{"params": list(model.parameters())}], plan)
    for y, indices in device.visits(plan):
        descend(optimizer, cross_entropy(model(x[indices]), y))
    return state_of(model)


def train_slice(
    model: nn.Sequential,
    first: str,
    device: Device,
    plan: Plan,
    train: Callable[[nn.Module, Device, Plan], State] = train_full,
) -> State:
    """EmbracingFL: train `first` and later layers on the recorded output of the earlier ones."""
    children = list(model._modules.items())  # a module may have several names
    cut = [name for name, _ in children].index(first)
    prefix = nn.Sequential(OrderedDict(children[:cut]))
    prefix = copy.deepcopy(prefix).double().eval()
    with torch.no_grad():
        recording = prefix(torch.from_numpy(device.x).double()).numpy()
    suffix = nn.Sequential(OrderedDict(children[cut:]))
    return train(suffix, Device(recording, device.y, device.seed), plan)


def train_leading(model: nn.Module, small: nn.Module, device: Device, plan: Plan) -> State:
    """HeteroFL: train `small`, which starts with the leading channels of `model`."""
    small = copy.deepcopy(small)
    large = model.state_dict()
    state = {n: large[n][leading(v)] for n, v in small.state_dict().items()}
    small.load_state_dict(state)
    return train_full(small, device, plan)


def leading(value: Tensor) -> tuple[slice, ...]:
    """Slices of the leading block with the shape of `value`."""
    return tuple(slice(size) for size in value.shape)


def train_window(
    model: nn.Module, small: nn.Module, device: Device, plan: Plan, first: int
) -> State:
    """FedRolex: `small` gets the k channels from `first` mod n on of every n, around the end.

    The state has the shapes of `model`, and NaN where `small` has nothing.
    """
    small, large = copy.deepcopy(small), model.state_dict()
    places = {
        name: np.ix_(
            *(
                (np.arange(size) + (first if size < whole else 0)) % whole
                for size, whole in zip(value.shape, large[name].shape, strict=True)
            )
        )
        for name, value in small.state_dict().items()
        if value.dim()
    }
    small.load_state_dict({n: large[n][index] for n, index in places.items()}, strict=False)
    state = {}
    for name, value in train_full(small, device, plan).items():
        state[name] = torch.full(large[name].shape, torch.nan, dtype=torch.float64)
        state[name][places[name]] = value
    return state


def mean_of_blocks(updates: Sequence[tuple[Mapping[str, Tensor], float]], old: State) -> State:
    """Weighted average of each element over the updates whose leading block holds it.

    An element that is NaN is not held.
    """
    new = {}
    for name, value in old.items():
        total, weights = np.zeros(value.shape), np.zeros(value.shape)
        for update, weight in updates:
            if name not in update:
                continue
            block, came = leading(update[name]), update[name].numpy()
            total[block] += np.nan_to_num(came) * weight
            weights[block] += weight * ~np.isnan(came)
        averaged = total / np.where(weights > 0, weights, 1)
        new[name] = torch.from_numpy(np.where(weights > 0, averaged, value.numpy()))
    return new


class Pair(nn.Module):
    """A dense layer replaced by factors U and V, from numpy's SVD of FedHM's unrolled matrix."""

    def __init__(self, dense: nn.Conv2d | nn.Linear, rank: int) -> None:
        super().__init__()
        self.dense = dense
        left, values, right = np.linalg.svd(self.unrolled(), full_matrices=False)
        root = np.sqrt(values[:rank])
        self.u = nn.Parameter(torch.from_numpy(left[:, :rank] * root))
        self.v = nn.Parameter(torch.from_numpy(right[:rank].T * root))
        self.bias = dense.bias

    def unrolled(self) -> np.ndarray:
        """The weight as a matrix (inputs * kh, outputs * kw)."""
        weight = self.dense.weight.detach().double().numpy()
        if weight.ndim == 2:
            return weight.T
        n, m, kh, kw = weight.shape
        matrix = np.empty((m * kh, n * kw))
        for o in range(n):
            for i in range(m):
                matrix[i * kh : (i + 1) * kh, o * kw : (o + 1) * kw] = weight[o, i]
        return matrix

    def product(self) -> Tensor:
        """U V^T in the shape of the dense layer's weight."""
        matrix = self.u @ self.v.T
        if isinstance(self.dense, nn.Linear):
            return matrix.T
        n, m, kh, kw = self.dense.weight.shape
        rows = [matrix[:, o * kw : (o + 1) * kw].reshape(m, kh, kw) for o in range(n)]
        return torch.stack(rows)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.dense, nn.Linear):
            return nn.functional.linear(x, self.product(), self.bias)
        layer = self.dense
        return nn.functional.conv2d(
            x, self.product(), self.bias, layer.stride, layer.padding, layer.dilation
        )


def train_low_rank(
    model: nn.Module, ranks: Mapping[str, int], decay: float, device: Device, plan: Plan
) -> State:
    """FedHM: train layers in `ranks` as U V^T with decay / 2 ||U V^T||_F^2 as weight decay."""
    model = copy.deepcopy(model).double().train()
    pairs = {
        name: Pair(cast(nn.Linear | nn.Conv2d, model.get_submodule(name)), rank)
        for name, rank in ranks.items()
    }
    modules = list(model.named_modules(remove_duplicate=False))
    paths = {
        path: pair for pair in pairs.values() for path, module in modules if module is pair.dense
    }
    for path, pair in paths.items():
        parent, _, own = path.rpartition(".")
        setattr(model.get_submodule(parent), own, pair)
    factors = [p for pair in pairs.values() for p in (pair.u, pair.v)]
    replaced = {id(p) for p in (*factors, *(pair.dense.weight for pair in pairs.values()))}
    dense = [p for p in model.parameters() if id(p) not in replaced]
    optimizer = sgd([{"params": dense}, {"params": factors, "weight_decay": 0.0}], plan)
    x = torch.from_numpy(device.x).double()
    for y, indices in device.visits(plan):
        penalty = sum((pair.u @ pair.v.T).square().sum() for pair in pairs.values())
        descend(optimizer, cross_entropy(model(x[indices]), y) + decay / 2 * penalty)
    recovered = {
        name: value
        for name, value in state_of(model).items()
        if name.rpartition(".")[0].removesuffix(".dense") not in paths
    }
    for name, pair in paths.items():
        recovered[f"{name}.weight"] = pair.product().detach()
        if pair.bias is not None:
            recovered[f"{name}.bias"] = pair.bias.detach()
    return recovered


@dataclass(frozen=True)
class BiLevel:
    """Settings of TDPFed: lambda, s, s' and the learning rate of the factors.

    pFedMe trains its factors with SGD instead of Adam.
    """

    penalty: float
    personal_steps: int
    factor_steps: int
    factor_rate: float
    adam: bool = True


@dataclass
class Tensorized:
    """CP factors by parameter name, and statistics; a dense parameter is its own single factor."""

    factors: dict[str, list[Tensor]]
    statistics: State = field(default_factory=dict)

    def composed(self) -> State:
        """The composed tensor [[A]] of every parameter (eq. 21), and the statistics."""
        return {n: composed(modes) for n, modes in self.factors.items()} | self.statistics


def composed(modes: Sequence[Tensor]) -> Tensor:
    """Sum over r of the outer products of column r of all factors."""
    if len(modes) == 1:
        return modes[0]
    letters = "abcdefg"[: len(modes)]
    return torch.einsum(",".join(f"{c}r" for c in letters) + f"->{letters}", *modes)


def factor_gradients(theta: Tensor, modes: Sequence[Tensor], penalty: float) -> list[Tensor]:
    """Eq. 25: penalty * (A_n V_n - theta_(n) (Khatri-Rao of the other factors)), V_n of eq. 26."""
    if len(modes) == 1:
        return [penalty * (modes[0] - theta)]
    letters = "abcdefg"[: len(modes)]
    gradients = []
    for n, mode in enumerate(modes):
        others = [
            (c, factor) for c, factor in zip(letters, modes, strict=True) if factor is not mode
        ]
        terms = ",".join([letters, *(f"{c}r" for c, _ in others)])
        projected = torch.einsum(f"{terms}->{letters[n]}r", theta, *(f for _, f in others))
        gram = torch.ones(mode.shape[1], mode.shape[1], dtype=mode.dtype)
        for _, factor in others:
            gram = gram * (factor.T @ factor)
        gradients.append(penalty * (mode @ gram - projected))
    return gradients


@dataclass(frozen=True)
class BiLevelResult:
    """The trained factors and the trained personal model."""

    factors: Tensorized
    personal: State

    def apart(self, other: "BiLevelResult") -> float:
        """The largest relative distance between the tensors of two results."""
        mine = {**self.factors.composed(), **{f"own {n}": v for n, v in self.personal.items()}}
        theirs = {**other.factors.composed(), **{f"own {n}": v for n, v in other.personal.items()}}
        return max(float((theirs[n].double() - v).norm() / v.norm()) for n, v in mine.items())


def train_cp(
    model: nn.Module,
    start: Tensorized,
    device: Device,
    plan: Plan,
    settings: BiLevel,
    personal: State | None = None,
    dtype: torch.dtype = torch.float64,
) -> BiLevelResult:
    """TDPFed: the client update from the factors `start`, in `dtype`.

    `personal` is the device's own model from earlier rounds. It starts as [[A]] if there is none.
    """
    model = copy.deepcopy(model).to(dtype).train()
    theta = dict(model.named_parameters())
    first = {name: value.clone() for name, value in (start.composed() | (personal or {})).items()}
    model.load_state_dict(first, strict=False)  # not strict: batch counters are not in it
    factors = {
        name: [mode.to(dtype, copy=True).requires_grad_() for mode in modes]
        for name, modes in start.factors.items()
    }
    nesterov = sgd([{"params": list(theta.values())}], plan, nesterov=True)
    optimizer = (torch.optim.Adam if settings.adam else torch.optim.SGD)(
        [mode for modes in factors.values() for mode in modes], lr=settings.factor_rate
    )
    x = samples(device, dtype)
    for y, indices in device.visits(plan):
        centres = {name: composed(modes).detach() for name, modes in factors.items()}
        for _ in range(settings.personal_steps):
            nesterov.zero_grad()
            distance = sum(
                (theta[name] - centre).square().sum() for name, centre in centres.items()
            )
            (cross_entropy(model(x[indices]), y) + settings.penalty / 2 * distance).backward()
            nesterov.step()
        for _ in range(settings.factor_steps):
            for name, modes in factors.items():
                detached = [mode.detach() for mode in modes]
                gradients = factor_gradients(theta[name].detach(), detached, settings.penalty)
                for mode, gradient in zip(modes, gradients, strict=True):
                    mode.grad = gradient
            optimizer.step()
    trained = Tensorized(
        {name: [mode.detach() for mode in modes] for name, modes in factors.items()},
        {name: value for name, value in state_of(model).items() if name not in theta},
    )
    own = {name: value.detach().clone() for name, value in theta.items()}
    return BiLevelResult(trained, own)


def mean_factors(updates: Sequence[tuple[Tensorized, float]]) -> Tensorized:
    """AFM (eq. 20, beta = 1): average every factor and every statistic."""
    weights = [weight for _, weight in updates]

    def average(values: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.average(np.stack(values), axis=0, weights=weights))

    first = updates[0][0]
    return Tensorized(
        {
            name: [
                average([u.factors[name][n].numpy() for u, _ in updates]) for n in range(len(modes))
            ]
            for name, modes in first.factors.items()
        },
        {
            name: average([u.statistics[name].numpy() for u, _ in updates])
            for name in first.statistics
        },
    )
