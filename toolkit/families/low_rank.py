"""`low-rank`: FedHM's hybrid network of truncated-SVD factors.

A convolution (n, m, kh, kw) of rank r becomes a kh x 1 convolution to r channels and a 1 x kw
convolution to n; a linear layer becomes two. The first layers stay dense.
"""

import copy
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from device_agent.manifest import TensorEntry
from exporters.capture import Captured, capture
from exporters.optimizers import SGD
from exporters.program import Tensors
from profiles.errors import SpecError
from toolkit.assembly import whole_network
from toolkit.factorization import roll, unroll
from toolkit.spec import Spec
from toolkit.submodel import Shapes, Stateless, Submodel, Treatment, factors_of, recover_dense
from toolkit.training import TrainingConfig
from toolkit.weights import GlobalModel

DECAY = 1e-4
"""Default Frobenius decay, FedHM's weight decay (Table 4)."""


class FactorizedConv2d(nn.Module):
    """A kh x 1 convolution `u` to `rank` channels, then a 1 x kw convolution `v`."""

    def __init__(self, dense: nn.Conv2d, rank: int) -> None:
        super().__init__()
        (kh, kw), (sh, sw), (dh, dw) = dense.kernel_size, dense.stride, dense.dilation
        assert not isinstance(dense.padding, str)
        ph, pw = dense.padding
        self.u = nn.Conv2d(dense.in_channels, rank, (kh, 1), (sh, 1), (ph, 0), (dh, 1), bias=False)
        self.v = nn.Conv2d(
            rank,
            dense.out_channels,
            (1, kw),
            (1, sw),
            (0, pw),
            (1, dw),
            bias=dense.bias is not None,
        )

    def forward(self, x: Tensor) -> Tensor:
        """(N, m, H, W) -> (N, n, H', W')."""
        return self.v(self.u(x))  # type: ignore[no-any-return]


class FactorizedLinear(nn.Module):
    """A linear layer `u` to `rank` features, then a linear layer `v`."""

    def __init__(self, dense: nn.Linear, rank: int) -> None:
        super().__init__()
        self.u = nn.Linear(dense.in_features, rank, bias=False)
        self.v = nn.Linear(rank, dense.out_features, bias=dense.bias is not None)

    def forward(self, x: Tensor) -> Tensor:
        """(N, ..., m) -> (N, ..., n)."""
        return self.v(self.u(x))  # type: ignore[no-any-return]


Layer = nn.Conv2d | nn.Linear


def plan(model: nn.Module, ratio: float, keep: int) -> tuple[dict[str, int], list[Treatment]]:
    """Rank of each layer to factorize, by module name, and what happens to every weighted layer.

    The rank is `ratio` times the output channels (FedHM, Table 5). 1 x 1 convolutions and the
    classifier stay dense and are not counted by `keep`, the number of first layers kept dense.
    """
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear | nn.RNNBase)
    ]
    ranks: dict[str, int] = {}
    treatments = []
    kept = 0
    for place, (name, module) in enumerate(layers):
        reason = why_dense(module, last=place == len(layers) - 1)
        if not reason and kept < keep:
            kept, reason = kept + 1, f"one of the first {keep} layers"
        if not reason:
            assert isinstance(module, Layer)
            rank = max(1, math.floor(ratio * outputs(module) + 0.5))
            reason = why_no_gain(module, rank)
        if reason:
            treatments.append(Treatment(name, "dense", reason))
        else:
            ranks[name] = rank
            treatments.append(Treatment(name, f"rank {rank}"))
    return ranks, treatments


def outputs(module: Layer) -> int:
    """Output channels or features."""
    return module.out_channels if isinstance(module, nn.Conv2d) else module.out_features


def why_dense(module: nn.Module, last: bool) -> str:
    """Why `module` is never factorized; empty where it can be."""
    if last:
        return "the classifier"
    if isinstance(module, nn.Linear):
        return ""
    if not isinstance(module, nn.Conv2d):
        return f"{type(module).__name__} has no low-rank form here"
    if module.kernel_size == (1, 1):
        return "a 1 x 1 convolution"
    if module.groups != 1:
        return "a grouped convolution"
    if isinstance(module.padding, str) or module.padding_mode != "zeros":
        return "its padding is not a number of zeros"
    return ""


def why_no_gain(module: Layer, rank: int) -> str:
    """Why factors of `rank` would be no smaller than the layer; empty where they are."""
    rows, columns = unroll(module.weight).shape
    if rank * (rows + columns) >= rows * columns:
        return f"rank {rank} would be no smaller"
    return ""


def factorized(model: nn.Module, ranks: Mapping[str, int]) -> nn.Module:
    """A copy of `model` with the layers in `ranks` replaced by factorized ones."""
    model = copy.deepcopy(model)
    for name, rank in ranks.items():
        parent_name, _, own = name.rpartition(".")
        parent, module = model.get_submodule(parent_name), model.get_submodule(name)
        replacement = (
            FactorizedConv2d(module, rank)
            if isinstance(module, nn.Conv2d)
            else FactorizedLinear(module, rank)  # type: ignore[arg-type]
        )
        setattr(parent, own, replacement)
    return model


def factor_weights(weights: GlobalModel, layer: str, rank: int) -> tuple[Tensor, Tensor]:
    """Weights of `u` and `v` for a dense `layer`: (r, m, kh, 1) and (n, r, 1, kw), or linear."""
    weight = weights.tensors[f"{layer}.weight"]
    u, v = weights.factorizer.truncated(layer, unroll(weight), rank)
    if weight.dim() == 2:
        return u.T, v
    n, m, kh, kw = weight.shape
    return u.reshape(m, kh, rank, 1).permute(2, 0, 1, 3), v.reshape(n, kw, rank, 1).permute(
        0, 2, 3, 1
    )


def factor_matrices(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """U (m * kh, r) and V (n * kw, r) of the weights of `u` and `v`."""
    if u.dim() == 2:
        return u.T, v
    rank = u.shape[0]
    return u.permute(1, 2, 0, 3).reshape(-1, rank), v.permute(0, 3, 1, 2).reshape(-1, rank)


class FrobeniusDecay:
    """strength / 2 * sum of ||U V^T||_F^2, each trace((U^T U)(V^T V)): r x r matrices only."""

    def __init__(self, pairs: Sequence[tuple[str, str]], strength: float) -> None:
        self.pairs = pairs
        self.strength = strength

    def __call__(self, tensors: Tensors) -> Tensor:
        """The penalty for the current factors."""
        terms = []
        for u_name, v_name in self.pairs:
            u, v = factor_matrices(tensors[u_name], tensors[v_name])
            terms.append(((u.T @ u) * (v.T @ v)).sum())
        return 0.5 * self.strength * torch.stack(terms).sum()


def table_entries(captured: Captured, ranks: Mapping[str, int]) -> list[TensorEntry]:
    """Entries for the factorized model's parameters and buffers."""
    entries = []
    for name in (*captured.parameters, *captured.buffers):
        layer, _, leaf = name.rpartition(".")
        owner, _, side = layer.rpartition(".")
        factor = owner in ranks
        entries.append(
            TensorEntry(
                name=name,
                role="parameter" if name in captured.parameters else "buffer",
                dtype="float32",
                shape=captured.shape(name),
                stands_for=f"{owner}.{leaf}" if factor else name,
                factor=side if factor and leaf == "weight" else None,
            )
        )
    return entries


class LowRank(Stateless):
    """See the module. Every round starts from the SVD of the global model."""

    name = "low-rank"
    usage = "low-rank:RATIO"
    summary = "truncated-SVD factors of convolution and linear layers (FedHM); keep=, decay="

    def split(
        self,
        model: nn.Module,
        sample_shape: tuple[int, ...],
        spec: Spec,
        training: TrainingConfig,
    ) -> Submodel:
        """See Family."""
        spec.check_options("keep", "decay")
        ratio = spec.number("rank ratio", 0, 1, "low-rank:0.25")
        decay = spec.option("decay", DECAY)
        ranks, treatments = plan(model, ratio, spec.whole("keep", 1))
        if not ranks and ratio < 1:
            raise SpecError(
                f"{str(spec)!r}: no layer of this model gets smaller; "
                + "; ".join(f"{t.layer}: {t.reason}" for t in treatments)
            )
        captured = capture(factorized(model, ranks), sample_shape)
        entries = table_entries(captured, ranks)
        pairs = [(f"{layer}.u.weight", f"{layer}.v.weight") for layer in ranks]
        optimizer = SGD(
            momentum=training.momentum,
            weight_decay=training.weight_decay,
            # Frobenius decay takes the place of weight decay (FedHM, section 2.2).
            undecayed=frozenset(name for pair in pairs for name in pair),
        )

        def cut(weights: GlobalModel) -> dict[str, Tensor]:
            values = {
                e.name: weights.tensors[e.stands_for]
                for e in entries
                if e.factor is None and e.stands_for is not None
            }
            for (u_name, v_name), (layer, rank) in zip(pairs, ranks.items(), strict=True):
                values[u_name], values[v_name] = factor_weights(weights, layer, rank)
            return values

        return whole_network(
            spec,
            captured,
            entries,
            optimizer,
            training,
            cut,
            penalty=FrobeniusDecay(pairs, decay) if pairs and decay else None,
            treatments=treatments,
        )

    def recover(
        self, tensors: Mapping[str, Tensor], table: Sequence[TensorEntry], shapes: Shapes
    ) -> dict[str, Tensor]:
        """Model shape alignment, FedHM eq. 1: U V^T in the dense layer's shape."""
        recovered = recover_dense(tensors, table)
        for name, sides in factors_of(tensors, table).items():
            u, v = factor_matrices(sides["u"], sides["v"])
            recovered[name] = roll(u @ v.T, shapes[name])
        return recovered


FAMILY = LowRank()
