"""Makes submodels that train a whole network with one step for each batch."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import assert_never

from msgspec.structs import replace
from torch import Tensor
from torch.fx import GraphModule

from device_agent.formats.manifest import (
    SAMPLES,
    Instruction,
    Step,
    TensorEntry,
    Train,
)
from exporters.objectives.loss_text import is_own
from exporters.objectives.objective import objective_of
from exporters.programs.program import Program, ProgramSignature
from exporters.programs.recorded_graph import attributes_with_gradient
from exporters.programs.training.losses import Objective
from exporters.programs.training.optimizers import SGD, Adam, Optimizer, Proximal
from exporters.programs.training.training_signatures import (
    Penalty,
    prediction_signatures,
    train_signature,
)
from exporters.recording.capture import capture
from exporters.recording.captured import Captured
from toolkit.submodels.capacity import Counts, count_activations, count_macs
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.hyperparameters import TrainingConfig
from toolkit.submodels.private_steps import private_instruction, private_signatures
from toolkit.submodels.rewritten_model import Rewritten, refuse_if_unusable
from toolkit.submodels.spec import Spec
from toolkit.submodels.submodel import (
    LayerDecision,
    SplitRequest,
    Submodel,
    element_count,
    statistics_role,
)


def training_instruction(
    source: str, training: TrainingConfig, steps: tuple[Step, ...] = ()
) -> Train:
    """The instruction to run `steps` on each batch of `source`; by default a `train` step."""
    return Train(
        source=source,
        **training.local_work._asdict(),
        batch_size=training.batch_size,
        steps=steps or (Step(signature="train", inputs={"rate": training.learning_rate}),),
    )


def make_optimizer(
    training: TrainingConfig,
    undecayed: frozenset[str] = frozenset(),
    counter: str = Adam.counter,
) -> Optimizer:
    """Make the optimizer that devices use.

    Args:
        training: The kind and hyper-parameters of the optimizer.
        undecayed: Names of the tensors without weight decay.
        counter: Name of the state tensor in which Adam counts its steps.
    """
    decay = training.weight_decay
    optimizer: Optimizer
    match training.optimizer:
        case "adam" | "adamw" as name:
            decoupled = name == "adamw"
            optimizer = Adam(
                weight_decay=decay, decoupled=decoupled, undecayed=undecayed, counter=counter
            )
        case "sgd" | "nesterov" as name:
            optimizer = SGD(training.momentum, name == "nesterov", decay, undecayed)
        case _ as unknown:
            assert_never(unknown)
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
    """`step` with its learning rate, if it has one, multiplied by `factor`."""
    if "rate" not in step.inputs:
        return step
    return replace(step, inputs={**step.inputs, "rate": step.inputs["rate"] * factor})


def without_gradient(
    graph: GraphModule, parameters: Iterable[TensorEntry], target: Objective
) -> frozenset[str]:
    """Names of parameters without a gradient. PyTorch's optimizers do not change or decay them."""
    trained = attributes_with_gradient(graph, target.used)
    return frozenset(entry.name for entry in parameters if entry.name not in trained)


def program_of(
    spec: Spec,
    captured: Captured,
    *,
    signatures: Sequence[ProgramSignature],
    tensors: Sequence[TensorEntry],
    schedule: Sequence[Instruction],
    target: Objective,
    int8: frozenset[str] = frozenset(),
) -> Program:
    """The program of a submodel for the samples of `captured` and the classes of `target`."""
    return Program(
        submodel=str(spec),
        sample_shape=captured.sample_shape,
        classes=target.classes,
        signatures=tuple(signatures),
        tensors=tuple(tensors),
        schedule=tuple(schedule),
        sample_dtype=captured.sample_dtype,
        sample_limit=captured.sample_limit,
        int8=int8,
    )


def counts_of(
    trained: Sequence[TensorEntry],
    exchanged: Sequence[TensorEntry],
    graph: GraphModule,
    batch: int,
) -> Counts:
    """The sizes of a submodel whose `graph` is trained on batches of `batch` samples."""
    return Counts(
        params=sum(element_count(entry.shape) for entry in trained),
        activations=count_activations(graph, batch),
        macs=count_macs(graph, batch),
        exchanged=sum(element_count(entry.shape) for entry in exchanged),
    )


def one_step_submodel(
    request: SplitRequest,
    captured: Captured,
    tensor_entries: Sequence[TensorEntry],
    cut: Callable[[GlobalModel], dict[str, Tensor]],
    *,
    undecayed: frozenset[str] = frozenset(),
    penalty: Penalty | None = None,
    layer_decisions: Sequence[LayerDecision] = (),
) -> Submodel:
    """Make a submodel that trains all of `captured`.

    Args:
        request: The spec, and how devices train.
        captured: The recorded model.
        tensor_entries: Its parameters, buffers and frozen parameters.
        cut: Takes the values of `tensor_entries` from a global model.
        undecayed: Names of the tensors without weight decay.
        penalty: A term to add to the loss, or None.
        layer_decisions: The form of each layer.
    """
    # The inputs of every signature are in the order of the entries.
    parameters = [entry for entry in tensor_entries if entry.role == "parameter"]
    buffers = [entry for entry in tensor_entries if entry.role == "buffer"]
    frozen = [entry for entry in tensor_entries if entry.role == "frozen"]
    training, shape = request.training, captured.sample_shape
    target = objective_of(training.loss, captured)
    still = without_gradient(captured.training, parameters, target)
    optimizer = make_optimizer(training, undecayed | still)
    steps: tuple[ProgramSignature, ...]
    if training.is_private:
        steps = private_signatures(
            captured, training, tensor_entries, optimizer, still, penalty, target
        )
        instruction = private_instruction(training)
    else:
        instruction = training_instruction(SAMPLES, training)
        steps = (
            train_signature(
                captured.training,
                shape,
                parameters,
                buffers,
                optimizer,
                penalty=penalty,
                reads=frozen,
                target=target,
                masked=training.masked,
                augment=training.augment,
            ),
        )
    program = program_of(
        request.spec,
        captured,
        target=target,
        signatures=(
            *steps,
            *prediction_signatures(captured.inference, shape, tensor_entries, target),
        ),
        tensors=(*tensor_entries, *optimizer.state(parameters)),
        schedule=(instruction,),
    )
    counts = counts_of(parameters, (*parameters, *buffers), captured.training, training.batch_size)
    return Submodel(request.spec, program, counts, tuple(layer_decisions), cut)


def rewritten_submodel(request: SplitRequest, rewritten: Rewritten) -> Submodel:
    """Make a submodel that trains all of a model in which layers were replaced.

    Raises SpecError if the model does not run with the new layers.
    """
    with refuse_if_unusable(request.spec, rewritten.layer_decisions):
        own = is_own(request.training.loss)
        captured = capture(rewritten.model, request.sample_shape, own)
    entries = (
        *rewritten.tensor_entries(captured, captured.parameters, "parameter"),
        *rewritten.tensor_entries(
            captured, captured.buffers, statistics_role(request.training, captured)
        ),
        *rewritten.tensor_entries(captured, captured.frozen, "frozen"),
    )
    return one_step_submodel(
        request,
        captured,
        entries,
        lambda weights: rewritten.tensor_values(weights, entries),
        undecayed=rewritten.undecayed,
        penalty=rewritten.penalty,
        layer_decisions=rewritten.layer_decisions,
    )
