"""Bi-level local training: a personal model beside the local model that is uploaded.

The device minimises f(theta) + lambda/2 ||theta - w||^2 over its personal model theta by Nesterov
steps and then moves the local model w towards theta (TDPFed's Algorithm 1; pFedMe where w is
dense). theta never leaves the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch.fx import GraphModule

from device_agent.formats.manifest import SAMPLES, Initialise, Step, TensorEntry, Train
from exporters.programs.captured import Captured
from exporters.programs.optimizers import Optimizer, select
from exporters.programs.program import (
    Program,
    ProgramSignature,
    Tensors,
    metric,
    samples,
    scalar,
    state_in,
    state_out,
)
from exporters.programs.recorded_graph import input_node, output_node
from exporters.programs.training_signatures import apply, evaluate, run, sample_dtype, train
from toolkit.personal.tensorized_model import Tensorized, distance, personal
from toolkit.submodels.capacity import Counts, activations, macs
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.one_step_submodel import make_optimizer
from toolkit.submodels.spec import Spec
from toolkit.submodels.submodel import LayerDecision, Submodel, count
from toolkit.submodels.tensor_entries import dense_tensor_entries, statistics_role
from toolkit.submodels.training_config import TrainingConfig


@dataclass(frozen=True)
class BiLevel:
    """lambda, and the steps on each batch: s personal ones, then s' local ones at `rate`."""

    penalty: float
    personal_steps: int
    local_steps: int
    rate: float
    optimizer: Optimizer


def personal_optimizer(training: TrainingConfig) -> Optimizer:
    """The personal model's: Nesterov's steps where others take SGD's (TDPFed eq. 15).

    No proximal term: lambda's is in its objective. The local model's Adam counts its own steps.
    """
    own = replace(training, proximal=0.0)
    if own.optimizer == "sgd" and own.momentum > 0:
        own = replace(own, optimizer="nesterov")
    return make_optimizer(own, counter="personal_steps")


def initialise_step(tensorized: Tensorized) -> ProgramSignature:
    """theta = w: the personal model of a device that has none yet."""

    def function(feeds: Tensors) -> dict[str, Tensor]:
        centres = tensorized.composed(feeds)
        return {f"{personal(name)}+": value.clone() for name, value in centres.items()}

    return ProgramSignature(
        name="personal_init",
        inputs=tuple(map(state_in, tensorized.uploaded)),
        outputs=tuple(map(state_out, tensorized.personal)),
        function=function,
    )


def local_step(name: str, tensorized: Tensorized, settings: BiLevel) -> ProgramSignature:
    """One step of the local model on lambda / 2 * ||theta - w||^2."""
    kept = settings.optimizer.state(tensorized.uploaded)
    written = (*tensorized.uploaded, *kept)

    def function(feeds: Tensors) -> dict[str, Tensor]:
        gaps = tensorized.gaps(feeds)
        new = settings.optimizer.update(
            select(feeds, tensorized.uploaded),
            tensorized.gradients(feeds, gaps, settings.penalty),
            select(feeds, kept),
            feeds["rate"],
        )
        value = 0.5 * settings.penalty * distance(gaps)
        return {"distance": value, **{f"{key}+": tensor for key, tensor in new.items()}}

    return ProgramSignature(
        name=name,
        inputs=(scalar("rate"), *map(state_in, (*written, *tensorized.personal))),
        outputs=(metric("distance"), *map(state_out, written)),
        function=function,
    )


def local_prediction(
    graph: GraphModule, tensorized: Tensorized, others: Sequence[TensorEntry]
) -> ProgramSignature:
    """Logits of the local model, which needs no personal model and no dense weights.

    `others` are the tensors beside the local model's that `graph` may read.
    """
    node = output_node(graph)
    shape = tuple(int(size) for size in input_node(graph).meta["val"].shape[1:])
    reads = (*tensorized.uploaded, *others)

    def function(feeds: Tensors) -> dict[str, Tensor]:
        return {"output": run(graph, {**feeds, **tensorized.values(feeds)}, feeds["x"])}

    return ProgramSignature(
        name="predict_local",
        inputs=(samples(shape, dtype=sample_dtype(graph)), *map(state_in, reads)),
        outputs=(samples(tuple(int(size) for size in node.meta["val"].shape[1:]), "output"),),
        function=function,
    )


def bi_level(
    spec: Spec,
    captured: Captured,
    tensorized: Tensorized,
    settings: BiLevel,
    training: TrainingConfig,
    factors: Callable[[GlobalModel], dict[str, Tensor]],
    *,
    local_name: str,
    layer_decisions: Sequence[LayerDecision] = (),
    compressed: GraphModule | None = None,
) -> Submodel:
    """A submodel that trains so; `factors` gives the numbers of the tensorized parameters.

    `compressed` predicts with the factors: a graph in which they are called as in
    `Tensorized.values`.
    """
    tracked = dense_tensor_entries(captured, captured.buffers, statistics_role(training))
    buffers = [entry for entry in tracked if entry.role == "buffer"]
    still = [entry for entry in tracked if entry.role == "frozen"]
    frozen = (*still, *dense_tensor_entries(captured, captured.frozen, "frozen"))
    optimizer = personal_optimizer(training)

    def names(name: str) -> str:
        return personal(name) if name in captured.parameters else name

    personal_step = train(
        captured.training,
        captured.sample_shape,
        tensorized.personal,
        buffers,
        optimizer,
        name="personal_step",
        penalty=lambda tensors: 0.5 * settings.penalty * distance(tensorized.gaps(tensors)),
        reads=(*tensorized.uploaded, *frozen),
        names=names,
        loss=training.loss,
        masked=training.masked,
    )
    reads = (*tensorized.personal, *buffers, *frozen)
    inference, shape = captured.inference, captured.sample_shape
    predict = apply("predict", inference, shape, reads, names=names)
    judge = evaluate(inference, shape, reads, training.loss, names=names)
    extra = []
    if compressed is not None:
        extra = [local_prediction(compressed, tensorized, (*buffers, *frozen))]
    steps = (
        Step(
            signature="personal_step",
            inputs={"rate": training.learning_rate},
            times=settings.personal_steps,
        ),
        Step(signature=local_name, inputs={"rate": settings.rate}, times=settings.local_steps),
    )
    program = Program(
        submodel=str(spec),
        sample_shape=captured.sample_shape,
        classes=captured.classes,
        signatures=(
            initialise_step(tensorized),
            personal_step,
            local_step(local_name, tensorized, settings),
            predict,
            judge,
            *extra,
        ),
        tensors=(
            *tensorized.uploaded,
            *buffers,
            *frozen,
            *tensorized.personal,
            *optimizer.state(tensorized.personal),
            *settings.optimizer.state(tensorized.uploaded),
        ),
        schedule=(
            Initialise(signature="personal_init"),
            Train(
                source=SAMPLES,
                epochs=training.epochs,
                batch_size=training.batch_size,
                steps=steps,
            ),
        ),
        sample_dtype=captured.sample_dtype,
        sample_limit=captured.sample_limit,
    )

    def cut(weights: GlobalModel) -> dict[str, Tensor]:
        own = {e.name: weights.tensors[e.name] for e in (*tensorized.dense, *buffers, *frozen)}
        return {**own, **factors(weights)}

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
        layer_decisions=tuple(layer_decisions),
        cut=cut,
    )
