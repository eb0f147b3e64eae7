"""The model card of an inference bundle: `card.json` for programs, `CARD.md` for people.

The card is in the bundle's folder and contains the hash of the manifest. It describes inputs and
outputs so that a program can run the graph with the card alone.
"""

from typing import Literal

from device_agent.formats.manifest import Dtype, Output, Part, Struct
from device_agent.formats.preprocessing import Preprocessing

CARD_VERSION = 1

Format = Literal["onnx", "tflite"]
Precision = Literal["float32", "float16", "int8"]


class GraphFile(Struct, frozen=True, kw_only=True):
    """A file with a graph, and the names of its input and its output.

    `signature` is the name of the graph in a TFLite file.
    """

    file: str
    signature: str
    input: str
    output: str


class GraphInput(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The samples that the first graph takes. In `shape`, None stands for the number of samples.

    int64 samples are at least 0 and, if `limit` is given, below `limit`. If the model has several
    inputs, `parts` lists them in the order in which they lie side by side in each sample.
    """

    dtype: Dtype
    shape: tuple[int | None, ...]
    limit: int | None
    parts: tuple[Part, ...] = ()


class GraphOutput(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The output of the last graph. In `shape`, None stands for the number of samples.

    `probabilities` says how the output is turned into probabilities along `class_axis`. With
    `numbers`, the output is the result of a regression, which has no class axis. If the model has
    several outputs, `parts` lists them in the order in which they lie side by side along axis 1.
    """

    shape: tuple[int | None, ...]
    probabilities: Output
    class_axis: int | None
    parts: tuple[Part, ...] = ()


class Further(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The errors of a regression, and the means of other figures of the loss, by name."""

    rmse: float | None = None
    mae: float | None = None
    metrics: dict[str, float] | None = None


class Quality(Further, frozen=True, kw_only=True):
    """Accuracy (None for a regression) and mean loss on held-out samples.

    `labels` is the number of labels that count. A sample has one label, or one label for each
    position with a class.
    """

    samples: int
    labels: int
    accuracy: float | None
    loss: float


class KindQuality(Further, frozen=True, kw_only=True):
    """How the devices of the card's kind judge the model that they received."""

    devices: int
    samples: int
    accuracy: float | None
    loss: float


class DeviceQuality(Further, frozen=True, kw_only=True):
    """How the federation's devices judge the whole model, on samples that they keep apart.

    `accuracy` (None for a regression) and `loss` are means over all labels of all devices, so a
    device with more labels counts more. `worst_accuracy` is the mean accuracy of the 10% of the
    devices with the lowest accuracy. A kind with a reduced submodel judges the reduced model.
    `kind` has the figures of the card's kind; None if no device of this kind judged, or outside a
    federation.
    """

    devices: int
    samples: int
    accuracy: float | None
    loss: float
    worst_accuracy: float | None
    kind: KindQuality | None


class Cost(Struct, frozen=True, kw_only=True):
    """The memory and time that a prediction of one sample needs.

    `memory_bytes` is the predicted peak above the memory of an idle agent. It assumes that one
    graph is in memory at a time. It is None if shapes depend on the data. `seconds` is the
    predicted time on the device `profile`. It is None without a profile or a predicted time, and
    for several graphs.
    """

    memory_bytes: int | None
    profile: str | None
    seconds: float | None


class Speed(Struct, frozen=True, kw_only=True):
    """Measured times of a prediction of one sample.

    They apply to one thread of the machine on which `deploy` ran. `seconds` is the time of the
    bundle's graph. `float32_seconds` is the time of the same graph with float32 weights.
    """

    processor: str
    seconds: float
    float32_seconds: float


class Signer(Struct, frozen=True, kw_only=True):
    """The coordinator's public key, base64 of 32 raw Ed25519 bytes, and its fingerprint."""

    key: str
    fingerprint: str


class ModelCard(Struct, frozen=True, kw_only=True):
    """The content of `card.json`.

    Attributes:
        model: Name of the model.
        submodel: The submodel in the graph.
        kind: The kind of devices; None if the model does not come from a federation.
        trained: The submodel that the kind's devices train.
        reason: Why the kind gets `submodel`.
        notes: What the operator should know before using the bundle.
        round: The round after which the model was taken; None if it is not known.
        format: The format of the graph.
        precision: The precision of the weights. int8 also computes with integers.
        calibrated_on: How many samples determined the value ranges for int8; None for other
            precisions.
        graphs: The graphs. The first graph reads the samples; each later graph reads the output of
            the graph before it.
        preprocessing: How pictures or CSV files become samples; None if the model takes arrays.
        classes: Size of the class axis; 1 stands for two classes.
        class_names: Names of the classes, in the order of the output; empty if not known.
        quality: Quality of this file, run by its runtime; None without held-out data.
        global_quality: Quality of the whole float32 model in PyTorch, on the same data.
        device_quality: Quality on the devices; None if they did not judge this round's model.
        graph_bytes: Size of the graphs' files.
        speed: The time relative to float32; None for float32.
        bundle_sha256: SHA-256 of the manifest, which has the hashes of all files.
        edgetailor: The version that wrote the bundle.
        signer: The owner of the signature in `card.sig`; None if the card is not signed.
    """

    version: int = CARD_VERSION
    model: str
    submodel: str
    kind: str | None
    trained: str | None
    reason: str
    notes: tuple[str, ...]
    round: int | None
    format: Format
    precision: Precision
    calibrated_on: int | None
    graphs: tuple[GraphFile, ...]
    input: GraphInput
    output: GraphOutput
    preprocessing: Preprocessing | None
    classes: int
    class_names: tuple[str, ...]
    quality: Quality | None
    global_quality: Quality | None
    device_quality: DeviceQuality | None
    graph_bytes: int
    cost: Cost
    speed: Speed | None
    bundle_sha256: str
    edgetailor: str
    signer: Signer | None
