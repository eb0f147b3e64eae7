"""The interface between submodels and exporters: pure functions of named tensors, and the state.

A program does not depend on a runtime or on weights. Each writer traces the same program. One
export is sufficient for all rounds, because weights are stored separately from the graphs.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from torch import Tensor
from torch.fx import GraphModule

from device_agent.formats.input_range import InputRange
from device_agent.formats.label_misfit import misfit_of_labels
from device_agent.formats.label_rule import LabelRule, output_of, rule_of
from device_agent.formats.manifest import (
    ABSOLUTE,
    PREDICT,
    Dtype,
    Instruction,
    Output,
    Part,
    Port,
    Record,
    TensorEntry,
    Train,
)
from device_agent.formats.preprocessing import Preprocessing
from profiles.errors import InputError, ModelError

Tensors = Mapping[str, Tensor]
Function = Callable[[Tensors], dict[str, Tensor]]

COMMON_BATCH = 32
"""A batch size that is usual on devices."""


@dataclass(frozen=True)
class Recomputation:
    """How a training step computes activations again; see `exporters/onnx/recomputed/`.

    Attributes:
        batch: The batch size for which the activations are chosen.
        most_work: The largest share of the step's work that may be repeated. The share of memory
            that this saves must be at least as large as the share of repeated work. None if the
            work has no limit and only the saved memory matters.
    """

    batch: int
    most_work: float | None = None


@dataclass(eq=False)
class JointTrace:
    """Signatures that begin with the same computation and are therefore traced together.

    Attributes:
        signature: A signature with the inputs and outputs of all these signatures.
        functions: The functions of these signatures. A signature with another function is traced
            alone.
        waiting: Traced graphs that wait for the next signature, with the decompositions that were
            used for the trace.
    """

    signature: "ProgramSignature"
    functions: tuple[Function, ...]
    waiting: list[tuple[Mapping[Any, Any], GraphModule]] = field(default_factory=list)


@dataclass(frozen=True)
class ProgramSignature:
    """A pure function to export, with named inputs and outputs.

    Attributes:
        name: Name of the signature in the bundle.
        inputs: Ports that the function reads, by name.
        outputs: Ports that the function returns, by name.
        function: Maps inputs to outputs. The function may use `torch.func` transforms, because
            tracing turns them into forward operators. It must not keep state between calls.
        source: The recorded model that the function runs, if any. With it, error messages name the
            user's line that calls an operator.
        recompute: How the backward pass computes activations again instead of keeping the
            activations of the forward pass. None if all activations are kept. Only ONNX graphs can
            compute activations again.
        joint: The trace that this signature shares with other signatures, if any.

    Raises:
        ModelError: Two ports have the same name, for example because a parameter of the model is
            called `rate`.
    """

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    function: Function
    source: GraphModule | None = None
    recompute: Recomputation | None = None
    joint: JointTrace | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        # A shared name would feed one value to both ports, for example the parameter `rate` as
        # the learning rate.
        counts = Counter(port.name for port in (*self.inputs, *self.outputs))
        twice = [name for name, count in counts.items() if count > 1]
        if twice:
            raise ModelError(
                "The signature {signature!r} already has an input or output {name!r}; the model's "
                "parameter or buffer {name!r} needs another name.",
                code="model.reserved-name",
                name=twice[0],
                signature=self.name,
            )

    @property
    def trains(self) -> bool:
        """Whether the signature returns gradients, or new values of state that it reads."""
        return bool(self.replacing) or any(port.kind == "gradient" for port in self.outputs)

    @property
    def replacing(self) -> tuple[str, ...]:
        """The names of the outputs that are new values of state that the signature reads."""
        read = {port.state for port in self.inputs if port.state is not None}
        return tuple(port.name for port in self.outputs if port.state in read)


@dataclass(frozen=True)
class Program:
    """Everything about one submodel, except the weights.

    Attributes:
        submodel: The submodel spec.
        sample_shape: Shape of one sample, without the batch.
        classes: Size of the class axis of the model's output, see `losses`.
        signatures: The functions to export.
        tensors: The device's state: parameters, buffers and optimizer state.
        schedule: The order in which the device runs the signatures.
        sample_dtype: Type of the samples.
        sample_limit: If this number is given, int64 samples are at least 0 and below it.
        preprocessing: How pictures or CSV files become samples. None if the devices have arrays.
        int8: Names of frozen tensors. If a graph contains them as constants, these are 8-bit
            integers; see `int8_scales.py`. The values of these tensors must be `rounded`.
        output: In a program that only predicts: how the model's output is turned into
            probabilities.
    """

    submodel: str
    sample_shape: tuple[int, ...]
    classes: int
    signatures: tuple[ProgramSignature, ...]
    tensors: tuple[TensorEntry, ...]
    schedule: tuple[Instruction, ...]
    sample_dtype: Dtype = "float32"
    sample_limit: int | None = None
    preprocessing: Preprocessing | None = None
    int8: frozenset[str] = frozenset()
    output: Output | None = None

    @property
    def labels(self) -> LabelRule:
        """The labels that the program takes."""
        ports = (port for signature in self.signatures for port in signature.inputs)
        labels = next((port for port in ports if port.kind == "labels"), None)
        predict = next((s.outputs[0].shape for s in self.signatures if s.name == PREDICT), None)
        return rule_of(labels, self.classes, predict)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The inputs that are packed into a sample. Empty if a sample is one array."""
        ports = (port for signature in self.signatures for port in signature.inputs)
        return next((p.packed for p in ports if p.kind == "samples" and p.packed), ())

    @property
    def largest_batch(self) -> int:
        """The largest batch size in the schedule, which determines the memory; at least 1."""
        return max((i.batch_size for i in self.schedule if isinstance(i, Train)), default=1)

    def batch_of(self, signature: str) -> int:
        """The largest batch on which the schedule runs `signature`. 1 if each sample runs alone."""
        steps = (s for i in self.schedule if isinstance(i, Train) for s in i.steps)
        single = any(s.signature == signature and s.each_sample is True for s in steps)
        return 1 if single else self.largest_batch


def with_recomputation(program: Program, most_work: float | None) -> Program:
    """Return `program` with training steps that compute activations again, see `Recomputation`.

    The activations are chosen for the schedule's largest batch. But if `most_work` is given, they
    are chosen for `COMMON_BATCH` samples, so that one graph can be used with different batch sizes.
    """

    def again(name: str) -> Recomputation:
        batch = program.batch_of(name)
        if most_work is not None and batch > 1:
            batch = COMMON_BATCH
        return Recomputation(batch, most_work)

    signatures = tuple(
        replace(s, recompute=again(s.name)) if s.trains else s for s in program.signatures
    )
    return replace(program, signatures=signatures)


def inference_program(program: Program) -> Program:
    """Return the program that only predicts, with frozen weights.

    The result has the stages that record the inputs of `predict`, then the signature `predict`.
    """
    stages = tuple(i for i in program.schedule if isinstance(i, Record))
    names = {*(stage.signature for stage in stages), PREDICT}
    signatures = tuple(replace(s, joint=None) for s in program.signatures if s.name in names)
    read = {port.state for signature in signatures for port in signature.inputs}
    tensors = (entry for entry in program.tensors if entry.name in read)
    measured = {port.name for s in program.signatures for port in s.outputs}
    packed = any(s.name == PREDICT and s.outputs[0].packed for s in signatures)
    output = "outputs" if packed else output_of(program.labels)
    if output == "numbers" and ABSOLUTE not in measured:
        output = "outputs"  # a regression whose loss is not the mean squared error
    return replace(
        program,
        signatures=signatures,
        tensors=tuple(msgspec.structs.replace(entry, role="frozen") for entry in tensors),
        schedule=stages,
        output=output,
    )


def with_preprocessing(program: Program, preprocessing: Preprocessing | None) -> Program:
    """Return `program` for devices whose files become samples by the rule `preprocessing`.

    Raises:
        InputError: These samples do not fit the program's model.
    """
    if preprocessing is None:
        return program
    wrong = misfit_of_labels(
        preprocessing, program.labels, program.sample_shape, program.sample_dtype
    )
    if wrong is not None:
        raise InputError(
            "[data] does not fit the model: {reason}.", code="config.data-misfit", reason=wrong
        )
    return replace(program, preprocessing=preprocessing)


def samples_port(
    shape: tuple[int, ...],
    name: str = "x",
    dtype: Dtype = "float32",
    input_range: InputRange = (),
    parts: tuple[Part, ...] = (),
) -> Port:
    """Port for a batch of samples of `shape`.

    If `input_range` is given, the samples' numbers are in this range. If there are `parts`, they
    are packed into the samples.
    """
    return Port(
        name=name,
        kind="samples",
        dtype=dtype,
        shape=(None, *shape),
        range=input_range or msgspec.UNSET,
        parts=parts or msgspec.UNSET,
    )


def labels_port(labels: LabelRule) -> Port:
    """Port for the labels of a batch of samples. `labels` gives their shape."""
    shape = (None, *(labels.shape or ()))
    port = Port(name="y", kind="labels", dtype=labels.dtype, shape=shape, sequence=labels.sequence)
    return packed_port(port, labels.parts) if labels.parts else port


def packed_port(port: Port, parts: tuple[Part, ...]) -> Port:
    """Return `port` as a packed port that contains `parts` side by side."""
    return msgspec.structs.replace(port, parts=parts)


def present_port(classes: int) -> Port:
    """Port for a mask (classes,): 1 for each class that occurs in the device's samples, else 0."""
    return Port(name="present", kind="classes", dtype="float32", shape=(classes,))


def scalar_port(name: str) -> Port:
    """Port for a number from the schedule, for example the learning rate."""
    return Port(name=name, kind="scalar", dtype="float32", shape=())


def seed_port() -> Port:
    """Port for a new random integer in each step, 0 <= seed < 2^31 - 1."""
    return Port(name="seed", kind="seed", dtype="int64", shape=())


def metric_port(name: str) -> Port:
    """Port for a number that the device reports, for example the loss."""
    return Port(name=name, kind="metric", dtype="float32", shape=())


def gradient_port(entry: TensorEntry) -> Port:
    """Port for the gradient of the parameter `entry`."""
    return Port(
        name=f"gradient:{entry.name}", kind="gradient", dtype=entry.dtype, shape=entry.shape
    )


def state_in(entry: TensorEntry) -> Port:
    """Input port for the tensor `entry` of the device's state."""
    return Port(
        name=entry.name, kind="state", dtype=entry.dtype, shape=entry.shape, state=entry.name
    )


def state_out(entry: TensorEntry) -> Port:
    """Output port for the new value of the tensor `entry`.

    The port's name ends in `+`, because inputs and outputs of a graph need different names.
    """
    return Port(
        name=f"{entry.name}+", kind="state", dtype=entry.dtype, shape=entry.shape, state=entry.name
    )
