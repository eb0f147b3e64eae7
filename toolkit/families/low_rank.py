"""`low-rank`: FedHM's hybrid network of truncated-SVD factors.

A convolution (n, m, kh, kw) of rank r becomes a kh x 1 convolution to r channels and a 1 x kw
convolution to n; a linear layer becomes two; the matrices of a recurrent layer become products.
The first layers stay dense.
"""

import copy
import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from device_agent.manifest import TensorEntry
from exporters.capture import Captured, capture
from exporters.program import Tensors
from profiles.errors import SpecError
from toolkit.assembly import whole_network
from toolkit.entries import statistics_role
from toolkit.layers import Layer, weighted_layers
from toolkit.low_rank_layers import (
    FactorizedConvolution,
    FactorizedLinear,
    FactorizedRecurrence,
    aligned,
    factor_matrices,
    factor_weights,
    groups_of,
)
from toolkit.product import Product
from toolkit.rewriting import Origin, Rewritten
from toolkit.spec import Spec
from toolkit.submodel import Shapes, Stateless, Submodel, Treatment, factors_of, recover_dense
from toolkit.training import TrainingConfig
from toolkit.weights import GlobalModel

DECAY = 1e-4
"""Default Frobenius decay, FedHM's weight decay (Table 4)."""

Ranks = dict[str, dict[str, int]]
"""By layer, then by the layer's own name of a weight."""


def plan(
    layers: Sequence[Layer], ratio: float, keep: int, among: Collection[str] | None = None
) -> tuple[Ranks, list[Treatment]]:
    """Ranks of the weights to factorize, and what happens to each of `layers`.

    The rank is `ratio` times the output channels (FedHM, Table 5), of one group where there are
    several, of one gate in recurrent layers, and times the rank itself of a linear layer. 1 x 1
    convolutions and the classifier stay dense and are not counted by `keep`, the number of first
    layers kept dense. Only the layers `among` are looked at, all where it is None.
    """
    ranks: Ranks = {}
    treatments = []
    kept = 0
    for layer in layers:
        if among is not None and layer.name not in among:
            continue
        reason = why_dense(layer, last=layer is layers[-1])
        if not reason and kept < keep:
            kept += 1
            reason = "the first layer" if keep == 1 else f"one of the first {keep} layers"
        if not reason and ratio == 1:
            reason = "rank ratio 1 is the layer itself"
        rank = max(1, math.floor(ratio * outputs(layer.module) + 0.5)) if not reason else 0
        fitting = {w: rank for w in layer.weights() if rank and gains(layer, w, rank)}
        if fitting:
            ranks[layer.name] = fitting
            treatments.append(Treatment(layer.title, f"rank {rank}"))
        else:
            reason = reason or f"rank {rank} would be no smaller"
            treatments.append(Treatment(layer.title, "dense", reason))
    return ranks, treatments


def outputs(module: nn.Module) -> int:
    """Output channels of a group, the most rank of a linear layer, or units of a gate."""
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return module.out_channels // module.groups
    if isinstance(module, nn.Linear):
        # Of a matrix that widens, the rank is at most its inputs.
        return min(module.in_features, module.out_features)
    assert isinstance(module, nn.RNNBase)
    return module.hidden_size


def why_dense(layer: Layer, last: bool) -> str:
    """Why `layer` is never factorized; empty where it can be."""
    if last:
        return "the classifier"
    module = layer.module
    if isinstance(module, nn.Conv1d | nn.Conv2d) and math.prod(module.kernel_size) == 1:
        return f"a {' x '.join('1' for _ in module.kernel_size)} convolution"
    if not any(getattr(module, weight).any() for weight in layer.weights()):
        return layer.obstacle or "its weights are zero, where factors do not train"
    return layer.obstacle


def gains(layer: Layer, weight: str, rank: int) -> bool:
    """Whether factors of `rank` have fewer numbers than the weight."""
    rows, columns = groups_of(getattr(layer.module, weight), layer.groups)[0].shape
    return rank * (rows + columns) < rows * columns


def greatest_ratio(layers: Sequence[Layer], treatments: Sequence[Treatment]) -> float:
    """The largest rank ratio that would make a layer smaller that is dense for its rank only."""
    tried = {t.layer for t in treatments if t.reason.startswith("rank ")}
    ratios = [0.0]
    for layer in layers:
        if layer.title in tried:
            size = outputs(layer.module)
            smaller = (any(gains(layer, w, r) for w in layer.weights()) for r in range(1, size + 1))
            ratios += [rank / size for rank, fits in enumerate(smaller, 1) if fits]
    return math.floor(max(ratios) * 1000) / 1000


def factorized(model: nn.Module, ranks: Ranks) -> nn.Module:
    """A copy of `model` with the layers in `ranks` replaced by factorized ones."""
    model = copy.deepcopy(model)
    for name, own in ranks.items():
        parent_name, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent_name), leaf, replacement(model.get_submodule(name), own))
    return model


def replacement(module: nn.Module, ranks: Mapping[str, int]) -> nn.Module:
    """The factorized layer for `module`."""
    if isinstance(module, nn.RNNBase):
        return FactorizedRecurrence(module, ranks)
    if isinstance(module, nn.Linear):
        return FactorizedLinear(module, ranks["weight"])
    assert isinstance(module, nn.Conv1d | nn.Conv2d)
    return FactorizedConvolution(module, ranks["weight"])


def origin(layer: str, own: str) -> Origin:
    """What the tensor called `own` inside the factorized layer `layer` stands for."""
    side, _, leaf = own.partition(".")
    factor = side if side in ("u", "v") and leaf != "bias" else None
    return Origin(join(layer, leaf), factor)


def join(layer: str, own: str) -> str:
    """Path of a tensor of `layer`."""
    return f"{layer}.{own}" if layer else own


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
            terms.append(((u.mT @ u) * (v.mT @ v)).sum())
        return 0.5 * self.strength * torch.stack(terms).sum()


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
        spec.check_no_inner()
        rewritten = self.rewrite(model, capture(model, sample_shape), spec)
        captured = capture(rewritten.model, sample_shape)
        entries = (
            *rewritten.entries(captured, captured.parameters, "parameter"),
            *rewritten.entries(captured, captured.buffers, statistics_role(training)),
            *rewritten.entries(captured, captured.frozen, "frozen"),
        )
        return whole_network(
            spec,
            captured,
            entries,
            training,
            lambda weights: rewritten.values(weights, entries),
            undecayed=rewritten.undecayed,
            penalty=rewritten.penalty,
            treatments=rewritten.treatments,
        )

    def rewrite(
        self,
        model: nn.Module,
        captured: Captured,
        spec: Spec,
        among: Collection[str] | None = None,
        keep: int = 1,
    ) -> Rewritten:
        """`model` with the layers `among` (all where None) factorized as `spec` says.

        `keep` is how many first layers stay dense where `spec` does not say. Raises SpecError where
        no layer would get smaller.
        """
        spec.check_options("keep", "decay")
        ratio = spec.number("rank ratio", 0, 1, "low-rank:0.25")
        strength = spec.option("decay", DECAY)
        layers = weighted_layers(model, captured)
        ranks, treatments = plan(layers, ratio, spec.whole("keep", keep), among)
        if not ranks and ratio < 1:
            reasons = "; ".join(f"{t.layer}: {t.reason}" for t in treatments)
            best = greatest_ratio(layers, treatments)
            possible = f" Ratios up to {best:.3g} make one smaller." if best else ""
            raise SpecError(
                f"{str(spec)!r}: no layer of this model gets smaller; {reasons}.{possible}"
            )
        new = factorized(model, ranks)
        origins = {
            join(layer, own): origin(layer, own)
            for layer in ranks
            for own in new.get_submodule(layer).state_dict()
        }
        pairs = {
            (layer, weight): tuple(
                next(n for n, o in origins.items() if o == Origin(join(layer, weight), side))
                for side in ("u", "v")
            )
            for layer, own in ranks.items()
            for weight in own
        }

        def factors(weights: GlobalModel) -> dict[str, Tensor]:
            values = {}
            for (layer, weight), (u_name, v_name) in pairs.items():
                path = join(layer, weight)
                values[u_name], values[v_name] = factor_weights(
                    weights.factorizer,
                    path,
                    weights.tensors[path],
                    ranks[layer][weight],
                    getattr(model.get_submodule(layer), "groups", 1),
                )
            return values

        names = [(u, v) for u, v in pairs.values()]
        return Rewritten(
            model=new,
            origins=origins,
            factors=factors,
            penalty=FrobeniusDecay(names, strength) if names and strength else None,
            # Frobenius decay takes the place of weight decay (FedHM, section 2.2).
            undecayed=frozenset(name for pair in names for name in pair),
            treatments=tuple(treatments),
        )

    def recover(
        self, tensors: Mapping[str, Tensor], table: Sequence[TensorEntry], shapes: Shapes
    ) -> Mapping[str, Tensor | Product]:
        """Model shape alignment, FedHM eq. 1: U V^T in the dense layer's shape."""
        factors = factors_of(tensors, table)
        products = {name: aligned(sides["u"], sides["v"]) for name, sides in factors.items()}
        return {**recover_dense(tensors, table), **products}


FAMILY = LowRank()
