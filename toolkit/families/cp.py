"""`cp`: TDPFed's bi-level training of CP factors and a personal model.

The device minimises f(theta) + lambda/2 ||theta - [[A]]||^2 over its personal model theta by
Nesterov steps (eq. 15) and then moves the factors A towards theta by Adam steps on the second term
(eq. 25 of the appendix). Only the factors are uploaded; theta never leaves the device. Biases and
normalisation parameters take part as they are.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import grad_and_value

from device_agent.manifest import SAMPLES, Initialise, Step, TensorEntry, Train
from exporters.capture import Captured, capture
from exporters.optimizers import SGD, Adam, select
from exporters.program import (
    Program,
    ProgramSignature,
    Tensors,
    metric,
    scalar,
    state_in,
    state_out,
)
from exporters.signatures import apply, train
from profiles.errors import SpecError
from toolkit.counting import Counts, activations, macs
from toolkit.entries import dense_entries
from toolkit.factorization import compose, cp_decompose, cp_rank, cp_refit
from toolkit.spec import Spec
from toolkit.submodel import Shapes, Submodel, Treatment, count, factors_of, recover_dense
from toolkit.training import TrainingConfig
from toolkit.weights import GlobalModel

PENALTY = 15.0
"""lambda; the paper's experiments use 14 and 15."""

PERSONAL_STEPS = 1
FACTOR_STEPS = 5
FACTOR_RATE = 3e-4
"""Adam's rate for the factors, the paper's for MNIST. Adam moves every number by about the rate in
each step, whatever the gradient: at ten times this the factors overshoot and the two models drive
each other away from the global one."""


def personal(name: str) -> str:
    """State name of the personal twin of the global parameter `name`."""
    return f"personal:{name}"


def factor_name(name: str, mode: int) -> str:
    """State name of the factor of mode `mode` (from 0) of the global parameter `name`."""
    return f"{name}#{mode}"


def key(spec: Spec) -> str:
    """Under which the server keeps factors: the rate alone decides their shapes."""
    return f"{spec.family}:{spec.size}"


class Tensorized:
    """The tensors of a model at one compression rate, and how they compose."""

    def __init__(self, captured: Captured, weights: Sequence[str], rate: float) -> None:
        self.names = list(captured.parameters)
        self.ranks = {name: cp_rank(captured.shape(name), rate) for name in weights}
        for name, rank in self.ranks.items():
            shape = captured.shape(name)
            if rank > count(shape) // max(shape):
                raise SpecError(
                    f"cp:{rate:g} gives {name!r} the rank {rank}, more than any tensor of shape "
                    f"{shape} has; ask for a larger compression rate."
                )
        self.factors = tuple(
            TensorEntry(
                name=factor_name(name, mode),
                role="parameter",
                dtype="float32",
                shape=(size, rank),
                stands_for=name,
                factor=str(mode),
            )
            for name, rank in self.ranks.items()
            for mode, size in enumerate(captured.shape(name))
        )
        dense = [name for name in self.names if name not in self.ranks]
        self.dense = dense_entries(captured, dense, "parameter")
        self.personal = tuple(
            TensorEntry(
                name=personal(name),
                role="personal",
                dtype="float32",
                shape=captured.shape(name),
                stored=False,
            )
            for name in self.names
        )
        self.modes = {name: len(captured.shape(name)) for name in self.ranks}

    @property
    def uploaded(self) -> tuple[TensorEntry, ...]:
        """Factors and dense parameters: the tensorized local model."""
        return (*self.factors, *self.dense)

    def composed(self, tensors: Tensors) -> dict[str, Tensor]:
        """[[A]] of every parameter, by the global parameter's name."""
        return {
            name: compose([tensors[factor_name(name, mode)] for mode in range(self.modes[name])])
            if name in self.ranks
            else tensors[name]
            for name in self.names
        }

    def distance(self, tensors: Tensors) -> Tensor:
        """||theta - [[A]]||^2 over all parameters."""
        centres = self.composed(tensors)
        gaps = [(tensors[personal(name)] - centres[name]).square().sum() for name in self.names]
        return torch.stack(gaps).sum()


def initialise_step(tensorized: Tensorized) -> ProgramSignature:
    """theta = [[A]]: the personal model of a device that has none yet."""

    def function(feeds: Tensors) -> dict[str, Tensor]:
        centres = tensorized.composed(feeds)
        return {f"{personal(name)}+": value.clone() for name, value in centres.items()}

    return ProgramSignature(
        name="personal_init",
        inputs=tuple(map(state_in, tensorized.uploaded)),
        outputs=tuple(map(state_out, tensorized.personal)),
        function=function,
    )


def factor_step(tensorized: Tensorized, penalty: float) -> ProgramSignature:
    """One Adam step of the factors on penalty / 2 * ||theta - [[A]]||^2."""
    optimizer = Adam()
    kept = optimizer.state(tensorized.uploaded)
    written = (*tensorized.uploaded, *kept)

    def function(feeds: Tensors) -> dict[str, Tensor]:
        def objective(factors: Mapping[str, Tensor]) -> Tensor:
            return 0.5 * penalty * tensorized.distance({**feeds, **factors})

        current = select(feeds, tensorized.uploaded)
        gradients, value = grad_and_value(objective)(current)
        new = optimizer.update(current, gradients, select(feeds, kept), feeds["rate"])
        return {"distance": value, **{f"{name}+": tensor for name, tensor in new.items()}}

    return ProgramSignature(
        name="factor_step",
        inputs=(scalar("rate"), *map(state_in, (*written, *tensorized.personal))),
        outputs=(metric("distance"), *map(state_out, written)),
        function=function,
    )


def weighted_parameters(model: nn.Module) -> list[str]:
    """Weights of convolution and linear layers, the classifier's too (TDPFed, Table I)."""
    return [
        f"{name}.weight" if name else "weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Linear)
    ]


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
        spec.check_options("penalty", "personal-steps", "factor-steps", "factor-rate")
        rate = spec.number("compression rate", 0, float("inf"), "cp:2.0")
        penalty = spec.option("penalty", PENALTY)
        captured = capture(model, sample_shape)
        tensorized = Tensorized(captured, weighted_parameters(model), rate)
        buffers = dense_entries(captured, captured.buffers, "buffer")
        nesterov = SGD(
            momentum=training.momentum, nesterov=True, weight_decay=training.weight_decay
        )
        personal_step = train(
            captured.training,
            sample_shape,
            tensorized.personal,
            buffers,
            nesterov,
            name="personal_step",
            penalty=lambda tensors: 0.5 * penalty * tensorized.distance(tensors),
            reads=tensorized.uploaded,
            names=lambda name: personal(name) if name in captured.parameters else name,
        )
        program = Program(
            submodel=str(spec),
            sample_shape=sample_shape,
            classes=captured.classes,
            signatures=(
                initialise_step(tensorized),
                personal_step,
                factor_step(tensorized, penalty),
                apply(
                    "predict",
                    captured.inference,
                    sample_shape,
                    (*tensorized.personal, *buffers),
                    names=lambda name: personal(name) if name in captured.parameters else name,
                ),
            ),
            tensors=(
                *tensorized.uploaded,
                *buffers,
                *tensorized.personal,
                *nesterov.state(tensorized.personal),
                *Adam().state(tensorized.uploaded),
            ),
            schedule=(
                Initialise(signature="personal_init"),
                Train(
                    source=SAMPLES,
                    epochs=training.epochs,
                    batch_size=training.batch_size,
                    steps=(
                        Step(
                            signature="personal_step",
                            inputs={"rate": training.learning_rate},
                            times=spec.whole("personal-steps", PERSONAL_STEPS, 1),
                        ),
                        Step(
                            signature="factor_step",
                            inputs={"rate": spec.option("factor-rate", FACTOR_RATE)},
                            times=spec.whole("factor-steps", FACTOR_STEPS, 1),
                        ),
                    ),
                ),
            ),
        )

        def cut(weights: GlobalModel) -> dict[str, Tensor]:
            factors = weights.kept.get(key(spec)) or decompose(tensorized, weights)
            own = {e.name: weights.tensors[e.name] for e in (*tensorized.dense, *buffers)}
            return {**own, **{e.name: factors[e.name] for e in tensorized.factors}}

        shared = sum(count(e.shape) for e in tensorized.uploaded)
        own = sum(count(e.shape) for e in tensorized.personal)
        return Submodel(
            spec=spec,
            program=program,
            counts=Counts(
                params=own + shared,
                activations=activations(captured.training, training.batch_size),
                macs=macs(captured.training, training.batch_size),
                exchanged=shared + sum(count(e.shape) for e in buffers),
            ),
            treatments=tuple(
                Treatment(name.removesuffix(".weight"), f"CP rank {rank}")
                for name, rank in tensorized.ranks.items()
            ),
            cut=cut,
        )

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


def decompose(tensorized: Tensorized, weights: GlobalModel) -> dict[str, Tensor]:
    """First factors of a global model that keeps none yet."""
    return {
        factor_name(name, mode): value
        for name, rank in tensorized.ranks.items()
        for mode, value in enumerate(cp_decompose(weights.tensors[name], rank))
    }


FAMILY = CP()
