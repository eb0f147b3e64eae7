"""The manifest of a bundle: everything that the agent knows about its work, as typed JSON.

A bundle is a folder of plain files: `manifest.json`, graphs and `weights.safetensors`. The agent
knows *signatures* (graphs with named inputs and outputs), *tensors* (the state that they read and
write) and a *schedule* (which signature runs on which data). The agent does not know submodel
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
    """One of the arrays that a packed port holds side by side, see `formats/packing.py`.

    Attributes:
        name: The array's name. A model's outputs without names are numbered from "0". Empty if the
            port has only this array: then the array has the name of the port.
        shape: Shape of one sample.
        dtype: Type of the array before it is packed. In the port all numbers are float32.
        limit: int64 numbers are at least 0 and below this number. Labels with more axes than the
            batch may also be -100, which is ignored. Labels with a limit of 0 are in no file: the
            loss reads none, and the port gets a zero for each sample.
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
    - `labels`: the labels of this batch. They are int64 classes, one for each sample or for each
      position of the model's output, or float32 numbers in the shape of the output.
    - `classes`: 1 for every class that occurs in the device's samples, 0 for the others.
    - `scalar`: a number that the schedule gives.
    - `seed`: a new random integer from 0 to 2^31 - 2 (for dropout).
    - `gradient`: as an output, the gradient of one sample; as an input, the noised mean of these
      gradients. An input has the name of the output that it belongs to.
    - `state`: the tensor whose name is in `state`.
    - `metric`: a number to report.

    With `sequence` the labels of a sample are one sequence (CTC). Then -100 is only allowed after
    the end of the sequence, and 0, the blank, is not a label.

    A port of kind `samples` or `labels` with `parts` is packed: it holds several arrays, each
    flattened to (batch, k), as float32 numbers side by side. Other ports leave `parts` out, because
    older agents refuse fields that they do not know.

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
        """The arrays that the port holds side by side; empty if it holds one array unchanged."""
        return () if self.parts is msgspec.UNSET else self.parts


class Signature(Struct, frozen=True, kw_only=True):
    """A graph and its ports. Outputs of kind `state` replace the tensors that they name.

    `graph` is the file with the graph. A TFLite file has all signatures of a bundle, by name.
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
        """The input that each output of `in_place` may overwrite, by output name."""
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
    - `optimizer`: exists for one round.
    - `personal`: stays on the device from round to round and is never uploaded.
    - `frozen`: only read. If a single graph reads the tensor, it may be a constant of this graph
      instead of a port. Then the table does not list the tensor.

    `stands_for` names the global parameter to which this tensor belongs. If the tensor is a factor
    of this parameter, `factor` names the factor; otherwise the tensor is the parameter itself. If
    the tensor is only a part of the global parameter, `part` gives for each axis the ranges [start,
    stop) in order. `stored` is false for tensors that start as zeros and are not in the bundle.
    With `by_class`, the first axis has a row for every class. The server then averages only the
    rows of classes that occur in the device's samples.
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

    `dtype` is the type of the numbers in the recorded file. Graphs still read and write float32.
    """

    signature: str
    source: str
    target: str
    dtype: RecordedDtype = "float32"


class Initialise(Struct, frozen=True, kw_only=True, tag="initialise", tag_field="do"):
    """Run `signature` once to fill the personal tensors that the device does not have yet.

    With `every_round` they are filled in every round, even if the device has them.
    """

    signature: str
    every_round: bool = False


class Step(Struct, frozen=True, kw_only=True):
    """Run `signature` `times` times on one batch. `inputs` are its scalar inputs by name.

    With `each_sample` it runs on each sample of the batch alone. Other steps leave this field out,
    because older agents refuse fields that they do not know.
    """

    signature: str
    inputs: dict[str, float]
    times: AtLeastOne = 1
    each_sample: bool | msgspec.UnsetType = msgspec.UNSET


class SamplePrivacy(Struct, frozen=True, kw_only=True):
    """Differential privacy for the samples of a device (DP-SGD, Abadi et al. 2016).

    The gradient of each sample is clipped to the L2 norm `clip`, over all its tensors. The sum over
    a batch gets Gaussian noise with the standard deviation `noise_multiplier` * `clip`, and is
    divided by `batch_size`. Each sample is in a batch with the same probability, independently of
    other samples. Devices report epsilon for `delta` to their owners.
    """

    clip: Annotated[float, Meta(ge=1e-6, le=1e6)]
    noise_multiplier: Annotated[float, Meta(ge=1e-6, le=1e6)]
    delta: Annotated[float, Meta(ge=1e-15, lt=1)]


class Train(Struct, frozen=True, kw_only=True, tag="train", tag_field="do", omit_defaults=True):
    """Train `epochs` epochs on shuffled batches of `source`; run all `steps` on each batch.

    With `batches` the training ends after this number of batches, even within an epoch. With
    `privacy` the batches are random, and steps get the gradients of samples only with noise.
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
    `Runtime`. `classes` is the size of the output's class axis; with size 1 the labels are 0 and 1.
    Samples of type int64 are at least 0 and, if `sample_limit` is given, below it. `preprocessing`
    defines how pictures or CSV files become samples.

    A bundle with `output` only predicts: its graphs hold the weights, and its schedule only records
    the inputs of the next stage. Bundles that train leave `output` out, because older agents refuse
    fields that they do not know.
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
