"""`low-rank`: FedHM's hybrid network of truncated-SVD factors.

A convolution (n, m, kh, kw) of rank r becomes a kh x 1 convolution to r channels and a 1 x kw
convolution to n channels. A linear layer becomes two linear layers. The matrices of a recurrent
layer become products of two factors. The first layers stay dense.
"""

import copy
import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from device_agent.formats.manifest import TensorEntry
from exporters.programs.program import Tensors
from exporters.recording.captured import Captured
from profiles.errors import SpecError
from toolkit.factor_layers.low_rank_layers import (
    FactorizedConvolution,
    FactorizedLinear,
    FactorizedProduct,
    FactorizedRecurrence,
    compose_weight,
    factor_matrices,
    factor_weights,
    unroll_groups,
)
from toolkit.families import forms
from toolkit.submodels.family import ExchangesLayers
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.matrix_product import Product
from toolkit.submodels.one_step_submodel import rewritten_submodel
from toolkit.submodels.rewritten_model import Origin, Rewritten, reasons
from toolkit.submodels.spec import Spec
from toolkit.submodels.submodel import (
    LayerDecision,
    Shapes,
    SplitRequest,
    Submodel,
    factors_of,
    recover_dense,
)
from toolkit.submodels.weighted_layers import (
    Convolution,
    Layer,
    is_product,
    replace_module,
    tensor_path,
    weighted_layers,
)

DECAY = 1e-4
"""Default Frobenius decay, FedHM's weight decay (Table 4)."""

Ranks = dict[str, dict[str, int]]
"""Ranks by layer, then by the name of the weight within the layer."""


def choose_ranks(
    layers: Sequence[Layer], ratio: float, keep: int, among: Collection[str] | None = None
) -> tuple[Ranks, list[LayerDecision]]:
    """Choose the ranks of the weights to factorize. Also returns the form of each layer.

    1 x 1 convolutions and the classifier always stay dense.

    Args:
        layers: All weighted layers, from the input to the output.
        ratio: Rank relative to the output channels (FedHM, Table 5). For a grouped convolution, the
            rank is relative to the channels of one group. For a recurrent layer, it is relative to
            the units of one gate. For a linear layer, it is relative to the full rank of the
            layer's weight.
        keep: How many of the first layers stay dense. Layers that are always dense are not counted.
        among: Names of the layers to consider; all if None.
    """
    ranks: Ranks = {}
    layer_decisions = []
    kept = 0
    for layer in layers:
        if among is not None and layer.name not in among:
            continue
        reason = why_dense(layer, last=layer is layers[-1])
        if not reason and kept < keep:
            kept += 1
            reason = "the first layer" if keep == 1 else f"one of the first {keep} layers"
        if not reason and ratio == 1:
            reason = "rank ratio 1 leaves the layer unchanged"
        rank = max(1, math.floor(ratio * reference_size(layer.module) + 0.5)) if not reason else 0
        fitting = {w: rank for w in layer.weights() if rank and saves_numbers(layer, w, rank)}
        if fitting:
            ranks[layer.name] = fitting
            layer_decisions.append(LayerDecision(layer.title, f"rank {rank}"))
        else:
            reason = reason or f"rank {rank} would be no smaller"
            layer_decisions.append(LayerDecision(layer.title, "dense", reason))
    return ranks, layer_decisions


def reference_size(module: nn.Module) -> int:
    """The size that the rank ratio is relative to; see `choose_ranks`."""
    if isinstance(module, Convolution):
        return module.out_channels // module.groups
    if isinstance(module, nn.Linear):
        # If the layer has more outputs than inputs, its inputs limit the rank.
        return min(module.in_features, module.out_features)
    if is_product(module):
        return min(module.get_parameter("weight").shape)
    assert isinstance(module, nn.RNNBase)
    return module.hidden_size


def why_dense(layer: Layer, last: bool) -> str:
    """Why `layer` is never factorized; empty if it can be."""
    if last:
        return "the classifier"
    module = layer.module
    if isinstance(module, Convolution) and math.prod(module.kernel_size) == 1:
        sizes = " x ".join("1" for _ in module.kernel_size)
        return f"a {sizes} convolution" if "x" in sizes else "a convolution of one point"
    if not any(getattr(module, weight).any() for weight in layer.weights()):
        return layer.obstacle or "its weights are zero, so that factors would not train"
    return layer.obstacle


def saves_numbers(layer: Layer, weight: str, rank: int) -> bool:
    """Whether factors of `rank` have fewer numbers than the weight."""
    rows, columns = unroll_groups(getattr(layer.module, weight), layer.groups)[0].shape
    # U has rank * rows numbers and V rank * columns.
    return rank * (rows + columns) < rows * columns


def highest_ratio(layers: Sequence[Layer], layer_decisions: Sequence[LayerDecision]) -> float:
    """The largest rank ratio that would make a layer smaller; 0 if there is none.

    Considers only layers that stay dense because of their rank.
    """
    tried = {d.layer for d in layer_decisions if d.reason.startswith("rank ")}
    ratios = [0.0]
    for layer in layers:
        if layer.title in tried:
            size = reference_size(layer.module)
            smaller = (
                any(saves_numbers(layer, w, r) for w in layer.weights()) for r in range(1, size + 1)
            )
            ratios += [rank / size for rank, fits in enumerate(smaller, 1) if fits]
    # Round down: rounding up could name a ratio that makes no layer smaller.
    return math.floor(max(ratios) * 1000) / 1000


def check_smaller(spec: Spec, rewritten: Rewritten, layers: Sequence[Layer]) -> None:
    """Raise SpecError if `spec` makes none of `layers` smaller; the message names a remedy."""
    ratio = forms.LOW_RANK.size_as_number(spec)
    if rewritten.origins or ratio == 1:
        return
    best = highest_ratio(layers, rewritten.layer_decisions)
    remedy = f" Ratios up to {best:.3g} make a layer smaller." if best else ""
    if "keep" not in spec.options and (first := choose_ranks(layers, ratio, 0)[0]):
        remedy += f" With keep=0 {' and '.join(first)} would get smaller."
    raise SpecError(
        "{spec!r}: no layer of this model gets smaller; {reasons}.{remedy}",
        code="spec.nothing-smaller",
        spec=str(spec),
        reasons=reasons(rewritten.layer_decisions),
        remedy=remedy,
        highest_ratio=best,
    )


def replace_layers(model: nn.Module, ranks: Ranks) -> nn.Module:
    """A copy of `model` in which factorized layers replace the layers in `ranks`."""
    # Leave the caller's model unchanged.
    model = copy.deepcopy(model)
    for name, own in ranks.items():
        dense = model.get_submodule(name)
        replace_module(model, dense, factorized_layer(dense, own))
    return model


def factorized_layer(module: nn.Module, ranks: Mapping[str, int]) -> nn.Module:
    """The factorized layer for `module`."""
    if isinstance(module, nn.RNNBase):
        return FactorizedRecurrence(module, ranks)
    if isinstance(module, nn.Linear):
        return FactorizedLinear(module, ranks["weight"])
    if is_product(module):
        return FactorizedProduct(module, ranks["weight"])
    assert isinstance(module, Convolution)
    return FactorizedConvolution(module, ranks["weight"])


def origin_of(layer: str, own: str) -> Origin:
    """Find the tensor of the dense layer that a tensor of the factorized layer replaces.

    `layer` is the name of the layer, and `own` is the name of the tensor within the factorized
    layer.
    """
    # The bias of `v` is the bias of the dense layer, not a factor.
    side, _, leaf = own.partition(".")
    factor = side if side in ("u", "v") and leaf != "bias" else None
    return Origin(tensor_path(layer, leaf), factor)


class FrobeniusDecay:
    """The penalty strength / 2 * sum of ||U V^T||_F^2 over pairs of factors.

    Each norm is computed as trace((U^T U)(V^T V)), which needs r x r matrices only.
    """

    def __init__(self, pairs: Sequence[tuple[str, str]], strength: float) -> None:
        self.pairs = pairs
        self.strength = strength

    def __call__(self, tensors: Tensors) -> Tensor:
        """The penalty for the factors among `tensors`."""
        terms = []
        for u_name, v_name in self.pairs:
            u, v = factor_matrices(tensors[u_name], tensors[v_name])
            terms.append(((u.mT @ u) * (v.mT @ v)).sum())
        return 0.5 * self.strength * torch.stack(terms).sum()


class LowRank(ExchangesLayers):
    """The family `low-rank`. Every round starts from the SVD of the global model."""

    form = forms.LOW_RANK

    def split(self, request: SplitRequest) -> Submodel:
        """See Family."""
        dense = request.capture()
        rewritten = self.rewrite(request.model, dense, request.spec)
        check_smaller(request.spec, rewritten, weighted_layers(request.model, dense))
        return rewritten_submodel(request, rewritten)

    def strength(self, spec: Spec) -> float:
        """The rank ratio."""
        return forms.LOW_RANK.size_as_number(spec)

    def rewrite(
        self,
        model: nn.Module,
        captured: Captured,
        spec: Spec,
        among: Collection[str] | None = None,
    ) -> Rewritten:
        """See ExchangesLayers."""
        # FedHM keeps the first layers dense. A slice freezes the layers before its cut, so no layer
        # after the cut has to stay dense.
        keep = forms.LOW_RANK.whole_number(spec, "keep", 1 if among is None else 0)
        strength = forms.LOW_RANK.number(spec, "decay", DECAY)
        layers = weighted_layers(model, captured)
        ranks, layer_decisions = choose_ranks(layers, self.strength(spec), keep, among)
        new = replace_layers(model, ranks)
        origins = {
            tensor_path(layer, own): origin_of(layer, own)
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
            layer_decisions=tuple(layer_decisions),
        )

    def recover(
        self, tensors: Mapping[str, Tensor], table: Sequence[TensorEntry], shapes: Shapes
    ) -> Mapping[str, Tensor | Product]:
        """Model shape alignment, FedHM eq. 1: U V^T in the dense layer's shape."""
        factors = factors_of(tensors, table)
        products = {name: compose_weight(sides["u"], sides["v"]) for name, sides in factors.items()}
        return {**recover_dense(tensors, table), **products}

    def received(
        self, key: str, table: Sequence[TensorEntry], model: GlobalModel
    ) -> Mapping[str, Tensor]:
        """The truncated SVD of the global model, at the ranks of the factors in `table`."""
        sides = {(e.stands_for or "", e.factor): e for e in table}
        received: dict[str, Tensor] = {}
        for (path, side), v in sides.items():
            if side == "v":
                u, rank = sides[path, "u"], v.shape[1]
                received[u.name], received[v.name] = factor_weights(
                    model.factorizer, path, model.tensors[path], rank, u.shape[0] // rank
                )
        return received


FAMILY = LowRank()
