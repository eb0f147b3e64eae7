"""Submodels that train a whole network with one step for each batch."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace
from torch import Tensor
from torch.fx import GraphModule

from device_agent.formats.manifest import SAMPLES, Step, TensorEntry, Train
from exporters.programs.optimizers import SGD, Adam, Optimizer, Proximal
from exporters.programs.program import Program
from exporters.programs.recorded_graph import attributes_with_gradient
from exporters.programs.training_signatures import (
    Penalty,
    evaluation_signature,
    forward_signature,
    train_signature,
)
from exporters.recording.capture import capture
from exporters.recording.captured import Captured
from toolkit.submodels.capacity import Counts, count_activations, count_macs
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.hyperparameters import TrainingConfig
from toolkit.submodels.rewritten_model import Rewritten, refuse_if_unusable
from toolkit.submodels.spec import Spec
from toolkit.submodels.submodel import LayerDecision, Submodel, element_count
from toolkit.submodels.tensor_entries import statistics_role


def training_instruction(source: str, training: TrainingConfig) -> Train:
    """The usual instruction: one `train` step on each batch of the data set `source`."""
    return Train(
        source=source,
        **training.local_work._asdict(),
        batch_size=training.batch_size,
        steps=(Step(signature="train", inputs={"rate": training.learning_rate}),),
    )


def make_optimizer(
    training: TrainingConfig,
    undecayed: frozenset[str] = frozenset(),
    counter: str = Adam.counter,
) -> Optimizer:
    """The optimizer that devices use.

    Args:
        training: Its kind and hyper-parameters.
        undecayed: Names of the tensors that weight decay does not apply to.
        counter: Name of the state tensor in which Adam counts its steps.
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


def scale_learning_rates(program: Program, factor: float) -> Program:
    """`program` with all learning rates of its schedule multiplied by `factor`."""
    schedule = tuple(
        replace(i, steps=tuple(_scale_rate(step, factor) for step in i.steps))
        if isinstance(i, Train)
        else i
        for i in program.schedule
    )
    return dataclasses.replace(program, schedule=schedule)


def _scale_rate(step: Step, factor: float) -> Step:
    """`step` with its learning rate multiplied by `factor`."""
    return replace(step, inputs={**step.inputs, "rate": step.inputs["rate"] * factor})


def without_gradient(graph: GraphModule, parameters: Iterable[TensorEntry]) -> frozenset[str]:
    """Names of the parameters that PyTorch's optimizers leave as they are, without decay."""
    trained = attributes_with_gradient(graph)
    return frozenset(entry.name for entry in parameters if entry.name not in trained)


def one_step_submodel(
    spec: Spec,
    captured: Captured,
    tensor_entries: Sequence[TensorEntry],
    training: TrainingConfig,
    cut: Callable[[GlobalModel], dict[str, Tensor]],
    *,
    undecayed: frozenset[str] = frozenset(),
    penalty: Penalty | None = None,
    layer_decisions: Sequence[LayerDecision] = (),
) -> Submodel:
    """A submodel that trains all of `captured`.

    Args:
        spec: The spec that the submodel is made from.
        captured: The recorded model.
        tensor_entries: Its parameters, buffers and frozen parameters.
        training: How devices train.
        cut: Takes the values of `tensor_entries` from a global model.
        undecayed: Names of the tensors that weight decay does not apply to.
        penalty: A term to add to the loss, if any.
        layer_decisions: What became of each layer.
    """
    # The order of the entries is the order of the inputs of every signature.
    parameters = [entry for entry in tensor_entries if entry.role == "parameter"]
    buffers = [entry for entry in tensor_entries if entry.role == "buffer"]
    frozen = [entry for entry in tensor_entries if entry.role == "frozen"]
    shape = captured.sample_shape
    still = without_gradient(captured.training, parameters)
    optimizer = make_optimizer(training, undecayed | still)
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
    predict = forward_signature("predict", captured.inference, shape, tensor_entries)
    judge = evaluation_signature(captured.inference, shape, tensor_entries, training.loss)
    program = Program(
        submodel=str(spec),
        sample_shape=shape,
        classes=captured.classes,
        signatures=(step, predict, judge),
        tensors=(*tensor_entries, *optimizer.state(parameters)),
        schedule=(training_instruction(SAMPLES, training),),
        sample_dtype=captured.sample_dtype,
        sample_limit=captured.sample_limit,
    )
    counts = Counts(
        params=sum(element_count(entry.shape) for entry in parameters),
        activations=count_activations(captured.training, training.batch_size),
        macs=count_macs(captured.training, training.batch_size),
        exchanged=sum(element_count(entry.shape) for entry in (*parameters, *buffers)),
    )
    return Submodel(spec, program, counts, tuple(layer_decisions), cut)


def rewritten_submodel(
    spec: Spec, rewritten: Rewritten, sample_shape: tuple[int, ...], training: TrainingConfig
) -> Submodel:
    """A submodel that trains all of a model in which layers were replaced.

    Raises SpecError if the model does not run with the new layers.
    """
    with refuse_if_unusable(spec, rewritten.layer_decisions):
        captured = capture(rewritten.model, sample_shape)
    entries = (
        *rewritten.tensor_entries(captured, captured.parameters, "parameter"),
        *rewritten.tensor_entries(captured, captured.buffers, statistics_role(training)),
        *rewritten.tensor_entries(captured, captured.frozen, "frozen"),
    )
    return one_step_submodel(
        spec,
        captured,
        entries,
        training,
        lambda weights: rewritten.tensor_values(weights, entries),
        undecayed=rewritten.undecayed,
        penalty=rewritten.penalty,
        layer_decisions=rewritten.layer_decisions,
    )
