"""Putting together submodels that train a whole network with one step a batch."""

import dataclasses
from collections.abc import Callable, Sequence

from msgspec.structs import replace
from torch import Tensor

from device_agent.formats.manifest import SAMPLES, Step, TensorEntry, Train
from exporters.programs.captured import Captured
from exporters.programs.optimizers import SGD, Adam, Optimizer, Proximal
from exporters.programs.program import Program
from exporters.programs.training_signatures import (
    Penalty,
    evaluation_signature,
    forward_signature,
    train_signature,
)
from toolkit.submodels.capacity import Counts, activations, macs
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.spec import Spec
from toolkit.submodels.submodel import LayerDecision, Submodel, count
from toolkit.submodels.training_config import TrainingConfig


def one_pass(source: str, training: TrainingConfig) -> Train:
    """The usual schedule: one `train` step on each batch of `source`."""
    return Train(
        source=source,
        epochs=training.epochs,
        batch_size=training.batch_size,
        steps=(Step(signature="train", inputs={"rate": training.learning_rate}),),
    )


def optimizer_of(
    training: TrainingConfig,
    undecayed: frozenset[str] = frozenset(),
    counter: str = Adam.counter,
) -> Optimizer:
    """The devices' optimizer; weight decay leaves the tensors `undecayed` alone.

    `counter` names what an Adam counts its steps in.
    """
    decay = training.weight_decay
    optimizer: Optimizer
    if training.optimizer in ("adam", "adamw"):
        decoupled = training.optimizer == "adamw"
        optimizer = Adam(
            weight_decay=decay, decoupled=decoupled, undecayed=undecayed, counter=counter
        )
    else:
        nesterov = training.optimizer == "nesterov"
        optimizer = SGD(training.momentum, nesterov, decay, undecayed)
    return Proximal(optimizer, training.proximal) if training.proximal else optimizer


def slowed(program: Program, factor: float) -> Program:
    """`program` with all learning rates of its schedule times `factor`."""
    schedule = tuple(
        replace(i, steps=tuple(slower(step, factor) for step in i.steps))
        if isinstance(i, Train)
        else i
        for i in program.schedule
    )
    return dataclasses.replace(program, schedule=schedule)


def slower(step: Step, factor: float) -> Step:
    """`step` with its learning rate times `factor`."""
    return replace(step, inputs={**step.inputs, "rate": step.inputs["rate"] * factor})


def whole_network(
    spec: Spec,
    captured: Captured,
    entries: Sequence[TensorEntry],
    training: TrainingConfig,
    cut: Callable[[GlobalModel], dict[str, Tensor]],
    *,
    undecayed: frozenset[str] = frozenset(),
    penalty: Penalty | None = None,
    treatments: Sequence[LayerDecision] = (),
) -> Submodel:
    """A submodel that trains all of `captured`.

    `entries` are its parameters, buffers and frozen parameters; weight decay leaves `undecayed`
    alone.
    """
    parameters = [entry for entry in entries if entry.role == "parameter"]
    buffers = [entry for entry in entries if entry.role == "buffer"]
    frozen = [entry for entry in entries if entry.role == "frozen"]
    shape = captured.sample_shape
    optimizer = optimizer_of(training, undecayed)
    step = train_signature(
        captured.training,
        shape,
        parameters,
        buffers,
        optimizer,
        penalty=penalty,
        reads=frozen,
        loss=training.loss,
        masked=training.masked,
    )
    predict = forward_signature("predict", captured.inference, shape, entries)
    judge = evaluation_signature(captured.inference, shape, entries, training.loss)
    program = Program(
        submodel=str(spec),
        sample_shape=shape,
        classes=captured.classes,
        signatures=(step, predict, judge),
        tensors=(*entries, *optimizer.state(parameters)),
        schedule=(one_pass(SAMPLES, training),),
        sample_dtype=captured.sample_dtype,
        sample_limit=captured.sample_limit,
    )
    counts = Counts(
        params=sum(count(entry.shape) for entry in parameters),
        activations=activations(captured.training, training.batch_size),
        macs=macs(captured.training, training.batch_size),
        exchanged=sum(count(entry.shape) for entry in (*parameters, *buffers)),
    )
    return Submodel(spec, program, counts, tuple(treatments), cut)
