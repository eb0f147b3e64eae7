"""`cp`: TDPFed's bi-level training of CP factors and a personal model.

The device minimises f(theta) + lambda/2 ||theta - [[A]]||^2 over its personal model theta by
Nesterov steps (eq. 15) and then moves the factors A towards theta by Adam steps on the second term
(eq. 25 of the appendix). Only the factors are uploaded. Biases and normalisation parameters take
part as they are.
"""

import math
from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.fx import GraphModule

from device_agent.formats.manifest import TensorEntry
from exporters.programs.capture import capture, record
from exporters.programs.captured import Captured
from exporters.programs.optimizers import Adam
from profiles.errors import SpecError
from toolkit.factor_layers.cp_layers import tensorized as tensorized_model
from toolkit.factorization.decompose_weights import compose, cp_decompose, cp_rank, cp_refit
from toolkit.personal.bilevel_training import BiLevel, bi_level
from toolkit.personal.tensorized_model import Tensorized, factor_name
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.rewritten_model import with_factors
from toolkit.submodels.spec import Spec
from toolkit.submodels.submodel import LayerDecision, Shapes, Submodel, factors_of, recover_dense
from toolkit.submodels.training_config import TrainingConfig
from toolkit.submodels.weighted_layers import Convolution, weighted_layers

PENALTY = 15.0
"""lambda; the paper's experiments use 14 and 15."""

PERSONAL_STEPS = 1
FACTOR_STEPS = 5
FACTOR_RATE = 3e-4
"""Adam's rate for the factors, the paper's for MNIST. Adam moves every number by about the rate in
each step, whatever the gradient: at ten times this the factors overshoot and the two models drive
each other away from the global one."""

LINEAR = (nn.Conv1d, nn.Conv2d, nn.Linear, nn.RNNBase)
"""Layers whose weights are factorized, the classifier's too (TDPFed, Table I)."""


def rate_of(spec: Spec) -> float:
    """The compression rate that `spec` asks for."""
    return spec.number("compression rate", 0, math.inf, "cp:2.0")


def plan(
    model: nn.Module, captured: Captured, spec: Spec
) -> tuple[dict[str, int], list[LayerDecision]]:
    """Rank of each weight to factorize, and what happens to every weighted layer.

    Raises SpecError naming the rates possible where a rank is more than any tensor has.
    """
    rate = rate_of(spec)
    ranks: dict[str, int] = {}
    treatments = []
    for layer in weighted_layers(model, captured):
        if not isinstance(layer.module, LINEAR) or not any(layer.weights()):
            linear = isinstance(layer.module, LINEAR)
            reason = "frozen" if linear else f"{type(layer.module).__name__} has no CP form"
            treatments.append(LayerDecision(layer.title, "dense", reason))
            continue
        own = {layer.path(w): cp_rank(captured.shape(layer.path(w)), rate) for w in layer.weights()}
        ranks |= own
        treatments.append(
            LayerDecision(
                layer.title, f"CP rank {', '.join(map(str, dict.fromkeys(own.values())))}"
            )
        )
    if not ranks:
        raise SpecError(f"{str(spec)!r}: no layer of this model has a CP form.")
    lowest = max(lowest_rate(captured.shape(name)) for name in ranks)
    highest = max(highest_rate(captured.shape(name)) for name in ranks)
    if rate > highest:
        raise SpecError(
            f"{str(spec)!r}: every weight has rank 1 already at {highest:.3g}; this model can be "
            f"compressed from {lowest:.3g} to {highest:.3g}."
        )
    for name, rank in ranks.items():
        shape = captured.shape(name)
        if rank > greatest_rank(shape):
            raise SpecError(
                f"{str(spec)!r} gives {name!r} the rank {rank}, more than any tensor of shape "
                f"{shape} has; this model can be compressed from {lowest:.3g} to {highest:.3g}."
            )
    return ranks, treatments


def greatest_rank(shape: tuple[int, ...]) -> int:
    """No tensor of `shape` has a higher CP rank: one component a fibre of its longest mode."""
    return math.prod(shape) // max(shape)


def lowest_rate(shape: tuple[int, ...]) -> float:
    """The compression rate that gives a weight of `shape` its greatest rank."""
    return math.prod(shape) / (greatest_rank(shape) * sum(shape))


def highest_rate(shape: tuple[int, ...]) -> float:
    """The compression rate that gives a weight of `shape` the rank 1, the least there is."""
    return math.prod(shape) / sum(shape)


class CP:
    """See the module."""

    name = "cp"
    usage = "cp:RATE"
    summary = (
        "CP factors and a personal model that stays on the device (TDPFed); "
        "penalty=, personal-steps=, factor-steps=, factor-rate="
    )
    averages_factors = True

    def split(
        self,
        model: nn.Module,
        sample_shape: tuple[int, ...],
        spec: Spec,
        training: TrainingConfig,
    ) -> Submodel:
        """See Family."""
        spec.check_no_inner()
        spec.check_options("penalty", "personal-steps", "factor-steps", "factor-rate")
        captured = capture(model, sample_shape)
        ranks, treatments = plan(model, captured, spec)
        tensorized = Tensorized(captured, ranks)
        with with_factors(spec, treatments):
            predicting = compressed(model, captured, ranks)

        def factors(weights: GlobalModel) -> dict[str, Tensor]:
            kept = weights.kept.get(spec.head) or decompose(tensorized, weights)
            return {e.name: kept[e.name] for e in tensorized.factors}

        settings = BiLevel(
            penalty=spec.option("penalty", PENALTY),
            personal_steps=spec.whole("personal-steps", PERSONAL_STEPS, 1),
            local_steps=spec.whole("factor-steps", FACTOR_STEPS, 1),
            rate=spec.option("factor-rate", FACTOR_RATE),
            optimizer=Adam(),
        )
        return bi_level(
            spec,
            captured,
            tensorized,
            settings,
            training,
            factors,
            local_name="factor_step",
            treatments=treatments,
            compressed=predicting,
        )

    def strength(self, spec: Spec) -> float:
        """One over the compression rate; factors of more numbers than the tensor gain nothing."""
        return 1 / max(1.0, rate_of(spec))

    def recover(
        self, tensors: Mapping[str, Tensor], table: Sequence[TensorEntry], shapes: Shapes
    ) -> dict[str, Tensor]:
        """The composed tensors [[A]] (eq. 21)."""
        recovered = recover_dense(tensors, table)
        for name, factors in factors_of(tensors, table).items():
            recovered[name] = compose([factors[str(mode)] for mode in range(len(factors))])
        return recovered

    def refit(
        self,
        factors: Mapping[str, Tensor],
        table: Sequence[TensorEntry],
        weights: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """A few ALS sweeps from the averaged factors towards the new global weights."""
        new: dict[str, Tensor] = {}
        for name, modes in factors_of(factors, table).items():
            start = [modes[str(mode)] for mode in range(len(modes))]
            fitted = cp_refit(weights[name], start)
            new |= {factor_name(name, mode): value for mode, value in enumerate(fitted)}
        return new


def compressed(model: nn.Module, captured: Captured, ranks: Mapping[str, int]) -> GraphModule:
    """The model as it predicts, with factors in place of every weight that allows it."""
    own = {
        layer.path("weight")
        for layer in weighted_layers(model, captured)
        if isinstance(layer.module, Convolution | nn.Linear) and not layer.obstacle
    }
    new = tensorized_model(model, {name: rank for name, rank in ranks.items() if name in own})
    return record(new, captured.sample_shape, captured.sample_dtype, training=False)


def decompose(tensorized: Tensorized, weights: GlobalModel) -> dict[str, Tensor]:
    """First factors of a global model that keeps none yet."""
    return {
        factor_name(name, mode): value
        for name, rank in tensorized.ranks.items()
        for mode, value in enumerate(cp_decompose(weights.tensors[name], rank))
    }


FAMILY = CP()
