"""A submodel by its table of tensors only: the dense weights that it stands for, and a round of it.

The user's own module computes with these weights. A tensor of which the submodel has only a part is
zero elsewhere.
"""

import copy
from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.func import functional_call

from device_agent.formats.manifest import TensorEntry
from oracles import Device, Plan, State, cross_entropy, samples, sgd

Table = Sequence[TensorEntry]


def composed(table: Table, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Dense tensors by their global names, from the uploaded and frozen tensors of a submodel."""
    dense: dict[str, Tensor] = {}
    groups: dict[str, dict[str, Tensor]] = {}
    for entry in table:
        if entry.stands_for is None:
            continue
        if entry.factor is None:
            dense[entry.stands_for] = tensors[entry.name]
        else:
            groups.setdefault(entry.stands_for, {})[entry.factor] = tensors[entry.name]
    for name, factors in groups.items():
        dense[name] = product(factors["u"], factors["v"]) if "u" in factors else outer(factors)
    return dense


def product(u: Tensor, v: Tensor) -> Tensor:
    """The dense weight of a layer u followed by a layer v."""
    if u.dim() == 2:
        return v @ u
    groups = u.shape[0] // v.shape[1]
    letters = "ri" if u.dim() == 3 else "rij"
    pairs = zip(u.chunk(groups), v.chunk(groups), strict=True)
    if letters == "ri":
        return torch.cat([torch.einsum("rmi,nr->nmi", a, b[:, :, 0]) for a, b in pairs])
    return torch.cat([torch.einsum("rmi,nrj->nmij", a[..., 0], b[:, :, 0]) for a, b in pairs])


def outer(factors: Mapping[str, Tensor]) -> Tensor:
    """Sum over r of the outer products of columns r."""
    letters = "abcd"[: len(factors)]
    terms = [factors[str(n)] for n in range(len(factors))]
    return torch.einsum(",".join(f"{c}r" for c in letters) + f"->{letters}", *terms)


def twin(model: nn.Module, trained: set[str]) -> nn.Module:
    """The user's model. Layers that are not trained are in inference mode."""
    model = copy.deepcopy(model)
    for name, module in model.named_modules():
        own = {f"{name}.{n}" if name else n for n, _ in module.named_parameters(recurse=False)}
        module.training = not own or bool(own & trained)
    return model


def places(entry: TensorEntry) -> tuple[Tensor, ...]:
    """Index of the elements of the global tensor that `entry` has."""
    axes = [torch.cat([torch.arange(*range_) for range_ in ranges]) for ranges in entry.part or ()]
    return torch.meshgrid(*axes, indexing="ij")


def train_composed(
    model: nn.Module,
    table: Table,
    received: Mapping[str, Tensor],
    decay: float,
    device: Device,
    plan: Plan,
    dtype: torch.dtype = torch.float64,
) -> State:
    """Train a submodel of one step from the tensors `received`; return its uploaded tensors.

    Args:
        model: The global model.
        table: The tensors of the submodel.
        received: Their values by the names of the table.
        decay: decay / 2 ||W||_F^2 is the weight decay of a composed weight W.
        device: The device.
        plan: Its training options.
        dtype: The type to compute in.
    """
    # Not the state dict, which has a shared tensor under all its names.
    own = chain(model.named_parameters(), model.named_buffers())
    base = {n: v.detach().to(dtype, copy=True) for n, v in own if v.is_floating_point()}
    # The agent's table also has what the optimizer keeps.
    table = [entry for entry in table if entry.name in received]
    state = {entry.name: received[entry.name].to(dtype, copy=True) for entry in table}
    leaves = {e.name: state[e.name].requires_grad_() for e in table if e.role == "parameter"}
    factors = {e.name for e in table if e.factor is not None}
    factorized = {str(e.stands_for) for e in table if e.factor is not None}
    parts = {str(e.stands_for): places(e) for e in table if e.part is not None}
    trained = {str(e.stands_for) for e in table if e.role == "parameter"}
    network = twin(model, trained).to(dtype)
    optimizer = sgd(
        [
            {"params": [leaf for name, leaf in leaves.items() if name not in factors]},
            {"params": [leaf for name, leaf in leaves.items() if name in factors]}
            | {"weight_decay": 0.0},
        ],
        plan,
    )
    x = samples(device, dtype)
    for y, indices in device.visits(plan):
        optimizer.zero_grad()
        held = composed(table, state)
        for name, index in parts.items():
            held[name] = torch.zeros_like(base[name]).index_put(index, held[name])
        loss = cross_entropy(functional_call(network, base | held, (x[indices],)), y)
        for name in factorized:
            loss = loss + decay / 2 * held[name].square().sum()
        loss.backward()
        optimizer.step()
        for entry in table:  # the forward pass has written statistics into `held`
            if entry.role == "buffer":
                written = held[str(entry.stands_for)]
                state[entry.name] = written[places(entry)] if entry.part else written
    new = composed(table, {name: value.detach() for name, value in state.items()})
    uploaded = {str(e.stands_for) for e in table if e.role in ("parameter", "buffer")}
    return {name: value.double() for name, value in new.items() if name in uploaded}
