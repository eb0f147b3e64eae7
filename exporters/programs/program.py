"""What a submodel hands to the exporters: pure functions of named tensors, and their state.

A program has no runtime in it and no weights: the same program is traced for every writer, and
one export serves every round because weights travel beside the graphs.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.fx import GraphModule

from device_agent.formats.manifest import Dtype, Instruction, Port, TensorEntry
from profiles.errors import ModelError

Tensors = Mapping[str, Tensor]
Function = Callable[[Tensors], dict[str, Tensor]]
Report = Callable[[str], None]
"""Hears of each stage of an export."""


def silent(stage: str) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class ProgramSignature:
    """A pure function to be exported: reads its inputs by port name, returns its outputs likewise.

    `function` may use autograd transforms (`torch.func`): tracing turns them into forward
    operators. It must not keep state between calls. `source` is the recorded model that it runs, if
    any: messages name the line of it that an operator comes from. Raises ModelError where two ports
    have one name, as where a parameter of the model is called `rate`.
    """

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    function: Function
    source: GraphModule | None = None

    def __post_init__(self) -> None:
        times = Counter(port.name for port in (*self.inputs, *self.outputs))
        twice = [name for name, count in times.items() if count > 1]
        if twice:
            raise ModelError(
                f"The signature {self.name!r} has an input or output of its own that is called "
                f"{twice[0]!r}: the model's parameter or buffer {twice[0]!r} needs another name."
            )


@dataclass(frozen=True)
class Program:
    """Everything about one submodel except its weights.

    `sample_shape` is one sample without the batch, `classes` the width of the model's output.
    Samples of type int64 are at least 0 and below `sample_limit`, where there is one.
    """

    submodel: str
    sample_shape: tuple[int, ...]
    classes: int
    signatures: tuple[ProgramSignature, ...]
    tensors: tuple[TensorEntry, ...]
    schedule: tuple[Instruction, ...]
    sample_dtype: Dtype = "float32"
    sample_limit: int | None = None


def samples(shape: tuple[int, ...], name: str = "x", dtype: Dtype = "float32") -> Port:
    """A batch of samples of `shape`."""
    return Port(name=name, kind="samples", dtype=dtype, shape=(None, *shape))


def present(classes: int) -> Port:
    """Which of the classes the device has samples of."""
    return Port(name="present", kind="classes", dtype="float32", shape=(classes,))


def scalar(name: str) -> Port:
    """A number that the schedule gives."""
    return Port(name=name, kind="scalar", dtype="float32", shape=())


def seed() -> Port:
    """A fresh random whole number for each step, from 0 below 2^31 - 1."""
    return Port(name="seed", kind="seed", dtype="int64", shape=())


def metric(name: str) -> Port:
    """A number to report."""
    return Port(name=name, kind="metric", dtype="float32", shape=())


def state_in(entry: TensorEntry) -> Port:
    """The tensor `entry` as an input."""
    return Port(
        name=entry.name, kind="state", dtype=entry.dtype, shape=entry.shape, state=entry.name
    )


def state_out(entry: TensorEntry) -> Port:
    """The new value of the tensor `entry` as an output; a graph's names are unique, hence `+`."""
    return Port(
        name=f"{entry.name}+", kind="state", dtype=entry.dtype, shape=entry.shape, state=entry.name
    )
