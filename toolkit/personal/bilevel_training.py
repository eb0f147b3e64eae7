"""Bi-level local training: a personal model, and a local model that is uploaded.

The device minimises f(theta) + lambda/2 ||theta - w||^2 over its personal model theta by Nesterov
steps. It then moves the local model w towards theta (TDPFed, Algorithm 1; with a dense w this is
pFedMe). theta never leaves the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch.fx import GraphModule

from device_agent.formats.manifest import SAMPLES, Initialise, Instruction, Step, TensorEntry
from exporters.objectives.objective import objective_of
from exporters.programs.program import (
    ProgramSignature,
    Tensors,
    metric_port,
    samples_port,
    scalar_port,
    state_in,
    state_out,
)
from exporters.programs.recorded_graph import input_node, output_node
from exporters.programs.training.optimizers import Optimizer, select
from exporters.programs.training.training_signatures import (
    Names,
    graph_samples,
    prediction_signatures,
    run,
    train_signature,
)
from exporters.recording.captured import Captured
from toolkit.personal.tensorized_model import Tensorized, distance, personal_name
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.hyperparameters import TrainingConfig
from toolkit.submodels.one_step_submodel import (
    counts_of,
    make_optimizer,
    program_of,
    training_instruction,
)
from toolkit.submodels.submodel import (
    LayerDecision,
    SplitRequest,
    Submodel,
    dense_tensor_entries,
    statistics_role,
)


@dataclass(frozen=True)
class BiLevelSettings:
    """Settings of bi-level training.

    Attributes:
        penalty: The factor lambda of the penalty.
        personal_steps: Steps of the personal model on each batch (s in TDPFed).
        local_steps: Steps of the local model that follow on each batch (s' in TDPFed).
        rate: Learning rate of the local model.
        optimizer: Optimizer of the local model.
        restart: Whether the personal model starts from the received model in every round.
    """

    penalty: float
    personal_steps: int
    local_steps: int
    rate: float
    optimizer: Optimizer
    restart: bool


def personal_optimizer(training: TrainingConfig) -> Optimizer:
    """The optimizer of the personal model: Nesterov's momentum replaces SGD's (TDPFed eq. 15).

    This optimizer has no proximal term, because the penalty with lambda replaces that term. It
    counts its steps separately from the local model's optimizer.
    """
    own = replace(training, proximal=0.0)
    if own.optimizer == "sgd" and own.momentum > 0:
        own = replace(own, optimizer="nesterov")
    return make_optimizer(own, counter="personal_steps")


def initial_step(tensorized: Tensorized) -> ProgramSignature:
    """The signature that sets the personal model theta to the local model w: theta = w."""

    def function(feeds: Tensors) -> dict[str, Tensor]:
        centres = tensorized.composed(feeds)
        # A clone, because an output must not be the same buffer as an input.
        return {f"{personal_name(name)}+": value.clone() for name, value in centres.items()}

    return ProgramSignature(
        name="personal_init",
        inputs=tuple(map(state_in, tensorized.uploaded)),
        outputs=tuple(map(state_out, tensorized.personal)),
        function=function,
    )


def local_step(name: str, tensorized: Tensorized, settings: BiLevelSettings) -> ProgramSignature:
    """The signature of one step of the local model on lambda / 2 * ||theta - w||^2."""
    kept = settings.optimizer.state(tensorized.uploaded)
    written = (*tensorized.uploaded, *kept)

    def function(feeds: Tensors) -> dict[str, Tensor]:
        gaps = tensorized.gaps(feeds)
        scaled = settings.optimizer.scaled
        weight = settings.penalty * feeds["rate"] if scaled else settings.penalty
        new = settings.optimizer.update(
            select(feeds, tensorized.uploaded),
            tensorized.gradients(feeds, gaps, weight),
            select(feeds, kept),
            feeds["rate"],
        )
        value = 0.5 * settings.penalty * distance(gaps)
        return {"distance": value, **{f"{key}+": tensor for key, tensor in new.items()}}

    return ProgramSignature(
        name=name,
        inputs=(scalar_port("rate"), *map(state_in, (*written, *tensorized.personal))),
        outputs=(metric_port("distance"), *map(state_out, written)),
        function=function,
    )


def local_prediction(
    graph: GraphModule, tensorized: Tensorized, others: Sequence[TensorEntry]
) -> ProgramSignature:
    """The signature that predicts with the local model, without personal model or dense weights.

    Args:
        graph: The inference graph of the model with factors.
        tensorized: The local model.
        others: Buffers and frozen parameters, which `graph` may read.
    """
    node = output_node(graph)
    shape = tuple(int(size) for size in input_node(graph).meta["val"].shape[1:])
    reads = (*tensorized.uploaded, *others)

    def function(feeds: Tensors) -> dict[str, Tensor]:
        return {"output": run(graph, {**feeds, **tensorized.values(feeds)}, feeds["x"])}

    return ProgramSignature(
        name="predict_local",
        inputs=(graph_samples(graph, shape), *map(state_in, reads)),
        outputs=(samples_port(tuple(int(size) for size in node.meta["val"].shape[1:]), "output"),),
        function=function,
    )


def personal_step(
    request: SplitRequest,
    captured: Captured,
    tensorized: Tensorized,
    settings: BiLevelSettings,
    buffers: Sequence[TensorEntry],
    frozen: Sequence[TensorEntry],
) -> ProgramSignature:
    """The signature of one step of the personal model on f(theta) + lambda/2 ||theta - w||^2."""
    return train_signature(
        captured.training,
        captured.sample_shape,
        tensorized.personal,
        buffers,
        personal_optimizer(request.training),
        name="personal_step",
        penalty=lambda tensors: 0.5 * settings.penalty * distance(tensorized.gaps(tensors)),
        reads=(*tensorized.uploaded, *frozen),
        names=personal_names(captured),
        target=objective_of(request.training.loss, captured),
        masked=request.training.masked,
        augment=request.training.augment,
    )


def personal_names(captured: Captured) -> Names:
    """Return a function that maps names of the graph to names of the device's state.

    Parameters get the names of their personal copies; buffers keep their names.
    """
    return lambda name: personal_name(name) if name in captured.parameters else name


def bilevel_schedule(
    training: TrainingConfig, settings: BiLevelSettings, local_name: str
) -> tuple[Instruction, ...]:
    """The schedule: start the personal model, then train both models on each batch.

    `local_name` is the name of the signature that steps the local model.
    """
    steps = (
        Step(
            signature="personal_step",
            inputs={"rate": training.learning_rate},
            times=settings.personal_steps,
        ),
        Step(signature=local_name, inputs={"rate": settings.rate}, times=settings.local_steps),
    )
    return (
        Initialise(signature="personal_init", every_round=settings.restart),
        training_instruction(SAMPLES, training, steps),
    )


def bilevel_submodel(
    request: SplitRequest,
    captured: Captured,
    tensorized: Tensorized,
    settings: BiLevelSettings,
    factors: Callable[[GlobalModel], dict[str, Tensor]],
    *,
    local_name: str,
    layer_decisions: Sequence[LayerDecision] = (),
    compressed: GraphModule | None = None,
) -> Submodel:
    """Build a submodel with bi-level training.

    Args:
        request: The spec, and how devices train.
        captured: The recorded model.
        tensorized: The local model, whose parameters may be factors.
        settings: Penalty, steps and optimizer.
        factors: Computes the values of the factors from a global model.
        local_name: Name of the local step.
        layer_decisions: The form of each layer, and the reason for this form.
        compressed: A graph that predicts with the factors, under the names of `Tensorized.values`.
            None if there are no factors.
    """
    training, target = request.training, objective_of(request.training.loss, captured)
    tracked = dense_tensor_entries(captured, captured.buffers, statistics_role(training, captured))
    buffers = [entry for entry in tracked if entry.role == "buffer"]
    static = [entry for entry in tracked if entry.role == "frozen"]
    frozen = (*static, *dense_tensor_entries(captured, captured.frozen, "frozen"))
    others = (*buffers, *frozen)
    signatures = [
        initial_step(tensorized),
        personal_step(request, captured, tensorized, settings, buffers, frozen),
        local_step(local_name, tensorized, settings),
        *prediction_signatures(
            captured.inference,
            captured.sample_shape,
            (*tensorized.personal, *others),
            target,
            names=personal_names(captured),
        ),
    ]
    if compressed is not None:
        signatures.append(local_prediction(compressed, tensorized, others))
    program = program_of(
        request.spec,
        captured,
        target=target,
        signatures=signatures,
        tensors=(
            *tensorized.uploaded,
            *others,
            *tensorized.personal,
            *personal_optimizer(training).state(tensorized.personal),
            *settings.optimizer.state(tensorized.uploaded),
        ),
        schedule=bilevel_schedule(training, settings, local_name),
    )

    def cut(weights: GlobalModel) -> dict[str, Tensor]:
        own = {e.name: weights.tensors[e.name] for e in (*tensorized.dense, *others)}
        return {**own, **factors(weights)}

    counts = counts_of(
        (*tensorized.personal, *tensorized.uploaded),  # a device trains both models
        (*tensorized.uploaded, *buffers),
        captured.training,
        training.batch_size,
    )
    return Submodel(request.spec, program, counts, tuple(layer_decisions), cut)
