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

from device_agent.formats.manifest import TensorEntry
from exporters.programs.capture import capture
from exporters.programs.captured import Captured
from exporters.programs.program import Tensors
from profiles.errors import SpecError
from toolkit.factor_layers.low_rank_layers import (
    FactorizedConvolution,
    FactorizedLinear,
    FactorizedRecurrence,
    aligned,
    factor_matrices,
    factor_weights,
    groups_of,
)
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.matrix_product import Product
from toolkit.submodels.one_step_submodel import whole_network
from toolkit.submodels.rewritten_model import Origin, Rewritten, with_factors
from toolkit.submodels.spec import Spec
from toolkit.submodels.submodel import (
    LayerDecision,
    Shapes,
    Stateless,
    Submodel,
    factors_of,
    recover_dense,
)
from toolkit.submodels.tensor_entries import statistics_role
from toolkit.submodels.training_config import TrainingConfig
from toolkit.submodels.weighted_layers import Convolution, Layer, join, weighted_layers

DECAY = 1e-4
"""Default Frobenius decay, FedHM's weight decay (Table 4)."""

Ranks = dict[str, dict[str, int]]
"""By layer, then by the layer's own name of a weight."""


def plan(
    layers: Sequence[Layer], ratio: float, keep: int, among: Collection[str] | None = None
) -> tuple[Ranks, list[LayerDecision]]:
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
            treatments.append(LayerDecision(layer.title, f"rank {rank}"))
        else:
            reason = reason or f"rank {rank} would be no smaller"
            treatments.append(LayerDecision(layer.title, "dense", reason))
    return ranks, treatments


def outputs(module: nn.Module) -> int:
    """Output channels of a group, the most rank of a linear layer, or units of a gate."""
    if isinstance(module, Convolution):
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
    if isinstance(module, Convolution) and math.prod(module.kernel_size) == 1:
        return f"a {' x '.join('1' for _ in module.kernel_size)} convolution"
    if not any(getattr(module, weight).any() for weight in layer.weights()):
        return layer.obstacle or "its weights are zero, where factors do not train"
    return layer.obstacle


def gains(layer: Layer, weight: str, rank: int) -> bool:
    """Whether factors of `rank` have fewer numbers than the weight."""
    rows, columns = groups_of(getattr(layer.module, weight), layer.groups)[0].shape
    return rank * (rows + columns) < rows * columns


def greatest_ratio(layers: Sequence[Layer], treatments: Sequence[LayerDecision]) -> float:
    """The largest rank ratio that would make a layer smaller that is dense for its rank only."""
    tried = {t.layer for t in treatments if t.reason.startswith("rank ")}
    ratios = [0.0]
    for layer in layers:
        if layer.title in tried:
            size = outputs(layer.module)
            smaller = (any(gains(layer, w, r) for w in layer.weights()) for r in range(1, size + 1))
            ratios += [rank / size for rank, fits in enumerate(smaller, 1) if fits]
    return math.floor(max(ratios) * 1000) / 1000


def check_smaller(spec: Spec, rewritten: Rewritten, layers: Sequence[Layer]) -> None:
    """Raise SpecError where `spec` makes none of `layers` smaller, saying what would."""
    ratio = FAMILY.strength(spec)
    if rewritten.origins or ratio == 1:
        return
    message = f"{str(spec)!r}: no layer of this model gets smaller; {reasons(rewritten)}."
    best = greatest_ratio(layers, rewritten.treatments)
    if best:
        message += f" Ratios up to {best:.3g} make one smaller."
    if "keep" not in spec.options and (first := plan(layers, ratio, 0)[0]):
        message += f" With keep=0 {' and '.join(first)} would get smaller."
    raise SpecError(message)


def reasons(rewritten: Rewritten) -> str:
    """Why each layer of `rewritten` that is dense is so."""
    return "; ".join(f"{t.layer}: {t.reason}" for t in rewritten.treatments if t.reason)


def factorized(model: nn.Module, ranks: Ranks) -> nn.Module:
    """A copy of `model` with the layers in `ranks` replaced by factorized ones."""
    model = copy.deepcopy(model)
    for name, own in ranks.items():
        model.set_submodule(name, replacement(model.get_submodule(name), own))
    return model


def replacement(module: nn.Module, ranks: Mapping[str, int]) -> nn.Module:
    """The factorized layer for `module`."""
    if isinstance(module, nn.RNNBase):
        return FactorizedRecurrence(module, ranks)
    if isinstance(module, nn.Linear):
        return FactorizedLinear(module, ranks["weight"])
    assert isinstance(module, Convolution)
    return FactorizedConvolution(module, ranks["weight"])


def origin(layer: str, own: str) -> Origin:
    """What the tensor called `own` inside the factorized layer `layer` stands for."""
    side, _, leaf = own.partition(".")
    factor = side if side in ("u", "v") and leaf != "bias" else None
    return Origin(join(layer, leaf), factor)


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
        dense = capture(model, sample_shape)
        rewritten = self.rewrite(model, dense, spec)
        check_smaller(spec, rewritten, weighted_layers(model, dense))
        with with_factors(spec, rewritten.treatments):
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

    def strength(self, spec: Spec) -> float:
        """The rank ratio."""
        return spec.number("rank ratio", 0, 1, "low-rank:0.25")

    def rewrite(
        self,
        model: nn.Module,
        captured: Captured,
        spec: Spec,
        among: Collection[str] | None = None,
        keep: int = 1,
    ) -> Rewritten:
        """`model` with the layers `among` (all where None) factorized as `spec` says.

        `keep` is how many first layers stay dense where `spec` does not say.
        """
        spec.check_options("keep", "decay")
        ratio = self.strength(spec)
        strength = spec.option("decay", DECAY)
        layers = weighted_layers(model, captured)
        ranks, treatments = plan(layers, ratio, spec.whole("keep", keep), among)
        new = factorized(model, ranks)
        origins = {
            join(layer, own): origin(layer, own)
            for layer in ranks
            for own in new.get_submodule(layer).state_dict()
        }
        pairs = {
            (layer, weight): tuple(
                next(n for n, o in origins.items() if o == Origin(layer.path(weight), side))
                for side in ("u", "v")
            )
            for layer in layers
            for weight in ranks.get(layer.name, ())
        }

        def factors(weights: GlobalModel) -> dict[str, Tensor]:
            values = {}
            for (layer, weight), (u_name, v_name) in pairs.items():
                path = layer.path(weight)
                values[u_name], values[v_name] = factor_weights(
                    weights.factorizer,
                    path,
                    weights.tensors[path],
                    ranks[layer.name][weight],
                    layer.groups,
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
