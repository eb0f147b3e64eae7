"""The manifest of a bundle: everything that the agent knows about the bundle, as typed JSON.

A bundle is a folder of plain files: `manifest.json`, graphs and `weights.safetensors`. The agent
knows *signatures* (graphs with named inputs and outputs), *tensors* (the state that signatures read
and write) and a *schedule* (which signature runs on which data). It does not know submodel
families.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from device_agent.formats.input_range import InputRange
from device_agent.formats.preprocessing import Preprocessing

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"
CARD, CARD_TEXT, CARD_SIGNATURE = "card.json", "CARD.md", "card.sig"
"""Files of the model card, which lie beside the manifest of a deployed bundle."""
SAMPLES = "x"
"""Name of the data set of the device's own samples."""

PREDICT, EVALUATE = "predict", "evaluate"
"""The signatures that every bundle has in addition to those that train."""
LOSS = "loss"
"""Name of the output that training and evaluation report."""
CORRECT, ABSOLUTE = "correct", "absolute"
"""Names of further outputs of an evaluation: the number of correct predictions, and the mean
absolute error of a regression by mean squared error. Other outputs are metrics of the loss."""

SAFE_LIMIT = 2
"""Generated integer samples are below this limit if the model gives none."""

AtLeastOne = Annotated[int, Meta(ge=1, lt=2**53)]
Count = Annotated[int, Meta(ge=0, lt=2**53)]
"""Integers that every JSON reader can hold: JavaScript's numbers are exact up to 2^53."""
Runtime = Literal["onnx", "litert"]
Dtype = Literal["float32", "int64"]
RecordedDtype = Literal["float32", "float16"]
Role = Literal["parameter", "buffer", "optimizer", "personal", "frozen"]
Output = Literal["softmax", "sigmoid", "numbers", "ctc", "independent", "outputs"]
"""How a model's output is turned into probabilities.

`numbers` are a regression's results. With `independent`, each number is the logit of one yes-or-no
question. `outputs` stay as the model computes them, because only its loss knows their meaning. Each
part of a packed output has its own rule.
"""
UPLOADED: tuple[Role, ...] = ("parameter", "buffer")


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Immutable record. Unknown fields are refused, so that a typo is never ignored."""


class Part(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of the arrays that a packed port contains side by side, see `formats/packing.py`.

    Attributes:
        name: The array's name. If a model's outputs have no names, they are numbered from "0". If
            the port has only this array, `name` is empty and the array has the name of the port.
        shape: Shape of one sample.
        dtype: Type of the array before it is packed. After packing, all numbers are float32.
        limit: int64 numbers are at least 0 and below this number. Labels with more axes than the
            batch may also be -100, which is ignored. If labels have a limit of 0, the loss reads no
            labels: no file contains them, and the port gets a zero for each sample.
        output: How an output is turned into probabilities; None for other parts.
    """

    name: str
    shape: tuple[Count, ...]
    dtype: Dtype = "float32"
    limit: Count | None = None
    output: Output | None = None


class Port(Struct, frozen=True, kw_only=True):
    """One named input or output of a graph.

    `shape` has None for the batch axis. `kind` defines what the agent feeds to an input or does
    with an output:

    - `samples`: a batch of the source data set.
    - `labels`: the labels of this batch. Labels are int64 classes, one for each sample or each
      position of the model's output. In a regression they are float32 numbers in the shape of the
      output.
    - `classes`: 1 for every class that occurs in the device's samples, 0 for all other classes.
    - `scalar`: a number that the schedule gives.
    - `seed`: a new random integer from 0 to 2^31 - 2 (for dropout).
    - `gradient`: as an output, the gradient of one sample; as an input, the noised mean of these
      gradients. The input and the output have the same name.
    - `state`: the tensor whose name is in `state`.
    - `metric`: a number to report.

    If `sequence` is set, the labels of a sample are one sequence (CTC). In a sequence, -100 is
    allowed only after the end, and 0 is not a label, because it is the blank.

    If a port of kind `samples` or `labels` has `parts`, the port is packed: it contains several
    arrays side by side as float32 numbers, each flattened to (batch, k). Other ports leave `parts`
    out, because older agents refuse unknown fields.

    `range` is the range of the numbers in random samples. If the numbers are standard normal,
    `range` is left out, because older agents refuse unknown fields.
    """

    name: str
    kind: Literal["samples", "labels", "classes", "scalar", "seed", "gradient", "state", "metric"]
    dtype: Dtype
    shape: tuple[Count | None, ...]
    state: str | None = None
    sequence: bool = False
    parts: tuple[Part, ...] | msgspec.UnsetType = msgspec.UNSET
    range: InputRange | msgspec.UnsetType = msgspec.UNSET

    @property
    def packed(self) -> tuple[Part, ...]:
        """The arrays that the port contains side by side. Empty if it has one unchanged array."""
        return () if self.parts is msgspec.UNSET else self.parts


class Signature(Struct, frozen=True, kw_only=True):
    """A graph and its ports. An output of kind `state` replaces the tensor that it names.

    `graph` is the file with the graph. A TFLite file contains all signatures of a bundle.
    `peak_bytes` is the predicted process peak of one run on one batch, above the idle agent:
    session, tensors, inputs and outputs. `peak_bytes` is None if there is no prediction.
    `winograd_peak_bytes` is the same prediction for the Winograd form of the graph, if the bundle
    has this form. `in_place` names the outputs that may overwrite the input of the same tensor, so
    that the tensor is in memory only once.
    """

    graph: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    peak_bytes: Count | None = None
    winograd_peak_bytes: Count | None = None
    in_place: tuple[str, ...] = ()

    def overwritten(self) -> dict[str, str]:
        """Map each output of `in_place` to the input that it may overwrite."""
        inputs = {port.state: port.name for port in self.inputs if port.state is not None}
        return {
            port.name: inputs[port.state]
            for port in self.outputs
            if port.name in self.in_place and port.state is not None
        }


class TensorEntry(Struct, frozen=True, kw_only=True):
    """One tensor of the device's state.

    Roles:

    - `parameter`: trained and uploaded.
    - `buffer`: updated by the forward pass and uploaded.
    - `optimizer`: state of the optimizer, which is kept for one round.
    - `personal`: stays on the device from round to round and is never uploaded.
    - `frozen`: only read. If only one graph reads the tensor, it may be a constant of this graph
      instead of a port. The table does not list such constants.

    `stands_for` names the global parameter to which this tensor belongs. If the tensor is a factor
    of this parameter, `factor` names the factor; otherwise the tensor is the parameter itself. If
    the tensor is only a part of the global parameter, `part` lists the ranges [start, stop) of each
    axis. If `stored` is false, the tensor is not in the bundle and starts as zeros. If `by_class`
    is set, the first axis has a row for every class. The server then averages only the rows of
    classes that occur in the device's samples.
    """

    name: str
    role: Role
    dtype: Dtype
    shape: tuple[Count, ...]
    stands_for: str | None = None
    factor: str | None = None
    part: tuple[tuple[tuple[Count, Count], ...], ...] | None = None
    stored: bool = True
    by_class: bool = False


class Record(Struct, frozen=True, kw_only=True, tag="record", tag_field="do", omit_defaults=True):
    """Run `signature` once over the data set `source` and save its output as `target`.

    This is one step of EmbracingFL's multi-step forward pass (Algorithm 1). The agent releases the
    graph and its state before the next instruction.

    `dtype` is the type of the numbers in the recorded file. The graphs read and write float32.
    """

    signature: str
    source: str
    target: str
    dtype: RecordedDtype = "float32"


class Initialise(Struct, frozen=True, kw_only=True, tag="initialise", tag_field="do"):
    """Run `signature` once to fill the personal tensors that the device does not have yet.

    If `every_round` is set, these tensors are filled in every round, even if the device has them.
    """

    signature: str
    every_round: bool = False


class Step(Struct, frozen=True, kw_only=True):
    """Run `signature` on one batch, `times` times. `inputs` has its scalar inputs by name.

    If `each_sample` is set, the signature runs on each sample of the batch separately. Other steps
    leave this field out, because older agents refuse unknown fields.
    """

    signature: str
    inputs: dict[str, float]
    times: AtLeastOne = 1
    each_sample: bool | msgspec.UnsetType = msgspec.UNSET


class SamplePrivacy(Struct, frozen=True, kw_only=True):
    """Differential privacy for the samples of a device (DP-SGD, Abadi et al. 2016).

    The gradient of each sample is clipped: its L2 norm over all tensors is at most `clip`. The
    gradients of a batch are added up. The sum gets Gaussian noise with the standard deviation
    `noise_multiplier` * `clip` and is divided by `batch_size`. Each sample is in a batch with the
    same probability, independently of other samples. Devices report epsilon for `delta` to their
    owners.
    """

    clip: Annotated[float, Meta(ge=1e-6, le=1e6)]
    noise_multiplier: Annotated[float, Meta(ge=1e-6, le=1e6)]
    delta: Annotated[float, Meta(ge=1e-15, lt=1)]


class Train(Struct, frozen=True, kw_only=True, tag="train", tag_field="do", omit_defaults=True):
    """Train `epochs` epochs on shuffled batches of `source`; run all `steps` on each batch.

    If `batches` is set, the training ends after this number of batches, even within an epoch. If
    `privacy` is set, the batches are random, and the gradients get noise before any step reads
    them.
    """

    source: str
    epochs: AtLeastOne
    batch_size: AtLeastOne
    steps: Annotated[tuple[Step, ...], Meta(min_length=1)]
    batches: AtLeastOne | None = None
    privacy: SamplePrivacy | None = None


Instruction = Record | Initialise | Train


class FileEntry(Struct, frozen=True, kw_only=True):
    """Size in bytes and SHA-256 (hex) of one file of the bundle."""

    size: Count
    sha256: str


class Manifest(Struct, frozen=True, kw_only=True):
    """The content of `manifest.json`.

    `base` is the fingerprint of the global model from which the bundle was cut. `runtime` is one of
    `Runtime`. `classes` is the size of the output's class axis. If the size is 1, the labels are 0
    and 1. Samples of type int64 are at least 0. If `sample_limit` is given, they are also below
    this limit. `preprocessing` defines how pictures or CSV files become samples.

    If a bundle has `output`, it only predicts: its graphs contain the weights, and its schedule
    only records the inputs of the next stage. Bundles that train leave `output` out, because older
    agents refuse unknown fields.
    """

    version: int
    submodel: str
    runtime: str
    base: str
    sample_shape: tuple[AtLeastOne, ...]
    classes: AtLeastOne
    sample_dtype: Dtype = "float32"
    sample_limit: AtLeastOne | None = None
    preprocessing: Preprocessing | None = None
    output: Output | msgspec.UnsetType = msgspec.UNSET
    signatures: dict[str, Signature]
    tensors: tuple[TensorEntry, ...]
    schedule: tuple[Instruction, ...]
    files: dict[str, FileEntry]


def encode(record: msgspec.Struct) -> bytes:
    """Encode a record as indented JSON. The same content gives the same bytes."""
    return msgspec.json.format(msgspec.json.encode(record, order="sorted"), indent=1) + b"\n"


def uploaded(tensors: tuple[TensorEntry, ...]) -> tuple[TensorEntry, ...]:
    """The entries whose tensors are in an update, in table order."""
    return tuple(entry for entry in tensors if entry.role in UPLOADED)
