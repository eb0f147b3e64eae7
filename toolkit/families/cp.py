"""`cp`: TDPFed's bi-level training of CP factors and a personal model.

The device minimises f(theta) + lambda/2 ||theta - [[A]]||^2 over its personal model theta by
Nesterov steps (eq. 15). It then moves the factors A towards theta by Adam steps on the second term
(eq. 25 of the appendix). Only the factors are uploaded. Biases and normalisation parameters are not
factorized.
"""

import math
from collections.abc import Mapping, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context

from torch import Tensor, nn
from torch.fx import GraphModule

from device_agent.formats.manifest import TensorEntry
from exporters.programs.training.optimizers import Adam
from exporters.recording.capture import record
from exporters.recording.captured import Captured
from exporters.recording.fixed_draws import fix_draws
from profiles.errors import SpecError
from toolkit.factor_layers.cp_layers import with_cp_factors
from toolkit.factorization.cp_decomposition import compose, cp_decompose, cp_rank, cp_refit
from toolkit.families import forms
from toolkit.personal.bilevel_training import BiLevelSettings, bilevel_submodel
from toolkit.personal.tensorized_model import Tensorized, factor_name
from toolkit.submodels.family import Family
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.rewritten_model import refuse_if_unusable
from toolkit.submodels.spec import Spec
from toolkit.submodels.submodel import (
    LayerDecision,
    Shapes,
    SplitRequest,
    Submodel,
    factors_of,
    recover_dense,
)
from toolkit.submodels.weighted_layers import Convolution, Layer, weighted_layers

PENALTY = 12.0
"""lambda: 12 on MNIST, 14 on CIFAR-10 (TDPFed, section VII-A)."""

PERSONAL_STEPS = 5
"""s, the steps of the personal model on each batch: 5 on MNIST, 4 on CIFAR-10."""

FACTOR_STEPS = 17
"""s', the steps of the factors on each batch: 17 on MNIST, 15 on CIFAR-10."""

FACTOR_RATE = 3e-4
"""eta, Adam's learning rate for the factors.

Section VII-D compares methods on MNIST with 3e-4. Section VII-A has 8e-4, and 4e-5 for CIFAR-10.
Each step of Adam moves every number by about the learning rate, for any size of the gradient.
"""

LINEAR = (nn.Conv1d, nn.Conv2d, nn.Linear, nn.RNNBase)
"""Layers whose weights are factorized, including the classifier (TDPFed, Table I)."""


def choose_ranks(
    model: nn.Module, captured: Captured, spec: Spec
) -> tuple[dict[str, int], list[LayerDecision]]:
    """Choose the rank of each weight to factorize. Also returns the form of every weighted layer.

    Raises SpecError if a rank is too high or too low for the weights of the model; the message
    names the compression rates that are possible.
    """
    rate = forms.CP.size_as_number(spec)
    ranks: dict[str, int] = {}
    layer_decisions = []
    for layer in weighted_layers(model, captured):
        if reason := why_dense(layer):
            layer_decisions.append(LayerDecision(layer.title, "dense", reason))
            continue
        own = {layer.path(w): cp_rank(captured.shape(layer.path(w)), rate) for w in layer.weights()}
        ranks |= own
        layer_decisions.append(
            LayerDecision(
                layer.title, f"CP rank {', '.join(map(str, dict.fromkeys(own.values())))}"
            )
        )
    if not ranks:
        raise SpecError(
            "{spec!r}: no layer of this model has a CP form. Use another family.",
            code="spec.nothing-smaller",
            spec=str(spec),
        )
    # Round towards the inside of the range, so that both ends are possible rates.
    most = max(highest_rate(captured.shape(name)) for name in ranks)
    lowest = _rounded(max(lowest_rate(captured.shape(name)) for name in ranks), ROUND_CEILING)
    highest = _rounded(most, ROUND_FLOOR)
    if lowest > highest:
        raise SpecError(
            "{spec!r}: the weights of this model are too small for CP factors; no rate fits all of "
            "them. Use another family.",
            code="spec.nothing-smaller",
            spec=str(spec),
        )
    if rate > most:
        raise SpecError(
            "{spec!r}: at a rate of {highest:g}, every weight has rank 1. Use a rate from "
            "{lowest:g} to {highest:g} for this model.",
            code="spec.rate-out-of-range",
            spec=str(spec),
            lowest=lowest,
            highest=highest,
        )
    for name, rank in ranks.items():
        shape = captured.shape(name)
        if rank > highest_rank(shape):
            raise SpecError(
                "{spec!r} gives {tensor!r} the rank {rank}, which is higher than the rank of any "
                "tensor of shape {shape}. Use a rate from {lowest:g} to {highest:g} for this "
                "model.",
                code="spec.rate-out-of-range",
                spec=str(spec),
                tensor=name,
                rank=rank,
                lowest=lowest,
                highest=highest,
                shape=shape,
            )
    return ranks, layer_decisions


def why_dense(layer: Layer) -> str:
    """Why the weights of `layer` stay dense; empty if they become factors."""
    if not isinstance(layer.module, LINEAR):
        return f"{type(layer.module).__name__} has no CP form"
    if not any(layer.weights()):
        return "frozen"
    return "another module has the same weight" if layer.is_tied else ""


def highest_rank(shape: tuple[int, ...]) -> int:
    """An upper bound on the CP rank of any tensor of `shape`.

    With one component for each fibre along the longest mode, CP factors give any tensor exactly.
    """
    return math.prod(shape) // max(shape)


def lowest_rate(shape: tuple[int, ...]) -> float:
    """The compression rate that gives a weight of `shape` its greatest rank."""
    return math.prod(shape) / (highest_rank(shape) * sum(shape))


def highest_rate(shape: tuple[int, ...]) -> float:
    """The compression rate that gives a weight of `shape` rank 1, the lowest possible."""
    return math.prod(shape) / sum(shape)


def _rounded(rate: float, direction: str) -> float:
    """`rate` with three digits."""
    return float(Context(prec=3, rounding=direction).create_decimal(rate))


class CP(Family):
    """The family `cp`; see the module."""

    form = forms.CP
    averages_factors = True
    trains_personal_model = True

    def split(self, request: SplitRequest) -> Submodel:
        """See Family."""
        captured, spec = request.capture(), request.spec
        ranks, layer_decisions = choose_ranks(request.model, captured, spec)
        tensorized = Tensorized(captured, ranks)
        with refuse_if_unusable(spec, layer_decisions):
            predicting = record_with_factors(request.model, captured, ranks)

        def factors(weights: GlobalModel) -> dict[str, Tensor]:
            received = self.received(spec.head, tensorized.factors, weights)
            return {e.name: received[e.name] for e in tensorized.factors}

        settings = BiLevelSettings(
            penalty=forms.CP.number(spec, "penalty", PENALTY),
            personal_steps=forms.CP.whole_number(spec, "personal-steps", PERSONAL_STEPS),
            local_steps=forms.CP.whole_number(spec, "factor-steps", FACTOR_STEPS),
            rate=forms.CP.number(spec, "factor-rate", FACTOR_RATE),
            optimizer=Adam(),
            restart=forms.CP.choice(spec, "personal-start") == "aggregate",
        )
        return bilevel_submodel(
            request,
            captured,
            tensorized,
            settings,
            factors,
            local_name="factor_step",
            layer_decisions=layer_decisions,
            compressed=predicting,
        )

    def strength(self, spec: Spec) -> float:
        """The strength: 1 / compression rate, and at most 1.

        Factors with more values than the tensor add no strength.
        """
        return 1 / max(1.0, forms.CP.size_as_number(spec))

    def recover(
        self, tensors: Mapping[str, Tensor], table: Sequence[TensorEntry], shapes: Shapes
    ) -> dict[str, Tensor]:
        """The composed tensors [[A]] (eq. 21)."""
        recovered = recover_dense(tensors, table)
        for name, factors in factors_of(tensors, table).items():
            if any(factor.dim() != 2 for factor in factors.values()):
                raise ValueError(f"a factor of {name!r} is not a matrix")
            recovered[name] = compose([factors[str(mode)] for mode in range(len(factors))])
        return recovered

    def received(
        self, key: str, table: Sequence[TensorEntry], model: GlobalModel
    ) -> Mapping[str, Tensor]:
        """The factors of the last round; in the first round, new factors of the weights."""
        ranks = {e.stands_for or "": e.shape[1] for e in table}
        return model.kept.get(key) or first_factors(ranks, model)

    def refit(
        self,
        factors: Mapping[str, Tensor],
        table: Sequence[TensorEntry],
        weights: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Fit the averaged factors to the new global weights by a few ALS sweeps."""
        new: dict[str, Tensor] = {}
        for name, modes in factors_of(factors, table).items():
            # The averaged factors are close to the new weights, so a few sweeps are enough.
            start = [modes[str(mode)] for mode in range(len(modes))]
            fitted = cp_refit(weights[name], start)
            new |= {factor_name(name, mode): value for mode, value in enumerate(fitted)}
        return new


def record_with_factors(
    model: nn.Module, captured: Captured, ranks: Mapping[str, int]
) -> GraphModule:
    """Record the model in inference mode, with CP factors in place of weights if possible."""
    own = {
        layer.path("weight")
        for layer in weighted_layers(model, captured)
        # Recurrent layers cannot compute with CP factors, so they predict with composed weights.
        if isinstance(layer.module, Convolution | nn.Linear) and not layer.obstacle
    }
    new = with_cp_factors(model, {name: rank for name, rank in ranks.items() if name in own})
    graph = record(new, captured.sample_shape, captured.sample_dtype, training=False)
    fix_draws(graph)
    return graph


def first_factors(ranks: Mapping[str, int], weights: GlobalModel) -> dict[str, Tensor]:
    """The first factors, for a global model that has no factors yet."""
    return {
        factor_name(name, mode): value
        for name, rank in ranks.items()
        for mode, value in enumerate(cp_decompose(weights.tensors[name], rank))
    }


FAMILY = CP()
