"""The manifest of a bundle: everything the agent knows about what it runs, as typed JSON.

A bundle is a folder of plain files: `manifest.json`, graphs and `weights.safetensors`. The agent
knows *signatures* (graphs with named inputs and outputs), *tensors* (the state they read and
write) and a *schedule* (which signature runs on what); it knows nothing of submodel families.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"
SAMPLES = "x"
"""Name of the data set that the device's own samples form."""

PREDICT, EVALUATE = "predict", "evaluate"
"""The signatures that every bundle has besides those that train."""
LOSS = "loss"
"""The number that training and judging report."""

SAFE_LIMIT = 2
"""Made-up whole numbers are below this where the model names no limit of its own."""

AtLeastOne = Annotated[int, Meta(ge=1, lt=2**53)]
Count = Annotated[int, Meta(ge=0, lt=2**53)]
"""Whole numbers that every reader of JSON can hold."""
Runtime = Literal["onnx", "litert"]
Dtype = Literal["float32", "int64"]
Role = Literal["parameter", "buffer", "optimizer", "personal", "frozen"]
UPLOADED: tuple[Role, ...] = ("parameter", "buffer")


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Immutable record; unknown fields are refused so that a typo never passes silently."""


class Port(Struct, frozen=True, kw_only=True):
    """One named input or output of a graph.

    `shape` has None where the batch goes. `kind` says what the agent feeds or does with it:
    `samples` a batch of the source data set, `labels` its labels (int64 classes, or float32 numbers
    in the shape of the model's output), `classes` 1 for every class that
    the device has samples of and 0 for the others, `scalar` a number that the schedule gives,
    `seed` a fresh random whole number from 0 below 2^31 - 1 (for dropout), `state` the tensor
    called `state`, `metric` a number to report.
    """

    name: str
    kind: Literal["samples", "labels", "classes", "scalar", "seed", "state", "metric"]
    dtype: Dtype
    shape: tuple[Count | None, ...]
    state: str | None = None


class Signature(Struct, frozen=True, kw_only=True):
    """A graph and its ports; outputs of kind `state` replace the tensors they name.

    `graph` is the file that holds it. A TFLite file holds all signatures of a bundle, by name.
    `peak_bytes` is the memory that running it on one batch adds to the idle agent, as predicted
    from the graph: session, tensors, inputs and outputs. None where no prediction was made.
    """

    graph: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    peak_bytes: Count | None = None


class TensorEntry(Struct, frozen=True, kw_only=True):
    """One tensor of the device's state.

    Roles: `parameter` is trained and uploaded, `buffer` is updated by the forward pass and
    uploaded, `optimizer` lives for one round, `personal` stays on the device from round to round
    and is never uploaded, `frozen` is only read. A frozen tensor may be a constant of the one graph
    that reads it instead: then it is neither in the table nor a port.

    `stands_for` names the global parameter that this tensor is, or is a factor of; `factor` says
    which factor. `part` says which part of the global parameter it is where it is not all of it:
    for each axis the ranges [start, stop) that the tensor holds, one after the other. `stored` is
    false for tensors that start as zeros instead of from the bundle.
    """

    name: str
    role: Role
    dtype: Dtype
    shape: tuple[Count, ...]
    stands_for: str | None = None
    factor: str | None = None
    part: tuple[tuple[tuple[Count, Count], ...], ...] | None = None
    stored: bool = True


class Record(Struct, frozen=True, kw_only=True, tag="record", tag_field="do"):
    """Run `signature` once over the data set `source` and keep its output as `target`.

    The signature's graph and state are released before the next instruction: this is one step of
    EmbracingFL's multi-step forward pass (Algorithm 1).
    """

    signature: str
    source: str
    target: str


class Initialise(Struct, frozen=True, kw_only=True, tag="initialise", tag_field="do"):
    """Run `signature` once to fill personal tensors that the device does not hold yet."""

    signature: str


class Step(Struct, frozen=True, kw_only=True):
    """`times` runs of `signature` on one batch; `inputs` are its scalar inputs by name."""

    signature: str
    inputs: dict[str, float]
    times: AtLeastOne = 1


class Train(Struct, frozen=True, kw_only=True, tag="train", tag_field="do"):
    """Go `epochs` times over `source` in shuffled batches, running all `steps` on each batch."""

    source: str
    epochs: AtLeastOne
    batch_size: AtLeastOne
    steps: Annotated[tuple[Step, ...], Meta(min_length=1)]


Instruction = Record | Initialise | Train


class FileEntry(Struct, frozen=True, kw_only=True):
    """Size in bytes and SHA-256 (hex) of one file of the bundle."""

    size: Count
    sha256: str


class Manifest(Struct, frozen=True, kw_only=True):
    """All of `manifest.json`. `base` fingerprints the global model that the bundle was cut from.

    `runtime` is one of `Runtime`. `classes` is the width of the model's output; a single output
    tells the labels 0 and 1 apart. Samples of type int64 are at least 0 and below `sample_limit`,
    where there is one.
    """

    version: int
    submodel: str
    runtime: str
    base: str
    sample_shape: tuple[AtLeastOne, ...]
    classes: AtLeastOne
    sample_dtype: Dtype = "float32"
    sample_limit: AtLeastOne | None = None
    signatures: dict[str, Signature]
    tensors: tuple[TensorEntry, ...]
    schedule: tuple[Instruction, ...]
    files: dict[str, FileEntry]


def labels_of(classes: int) -> int:
    """Labels of a model with `classes` outputs are below this."""
    return max(classes, 2)


def label_dtype(manifest: Manifest) -> Dtype:
    """The labels' type: int64 for classes, float32 for the numbers of a regression."""
    ports = (port for signature in manifest.signatures.values() for port in signature.inputs)
    return next((port.dtype for port in ports if port.kind == "labels"), "int64")


def encode(record: msgspec.Struct) -> bytes:
    """JSON of any record here, indented for reading and the same bytes for the same content."""
    return msgspec.json.format(msgspec.json.encode(record, order="sorted"), indent=1) + b"\n"


def uploaded(tensors: tuple[TensorEntry, ...]) -> tuple[TensorEntry, ...]:
    """The entries that an update carries, in table order."""
    return tuple(entry for entry in tensors if entry.role in UPLOADED)
