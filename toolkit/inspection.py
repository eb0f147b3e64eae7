"""Sizes of submodels, and the places where a model can be cut: `edgetailor inspect`."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from torch import nn

from exporters.export import Format, compile_graphs
from exporters.programs.operator_support import may_lack_form
from exporters.programs.tracing import operators
from exporters.recording.capture import SharedRecording
from exporters.recording.captured import Captured
from profiles.errors import EdgeTailorError, ExportError, ModelError, SpecError
from toolkit.cutting.cut_points import Cutter
from toolkit.splitting import split
from toolkit.submodels.capacity import count_activations
from toolkit.submodels.hyperparameters import TrainingConfig
from toolkit.submodels.submodel import LayerDecision, Submodel, refuse_changed_parameters
from toolkit.trained_outputs import TrainedOutputs

INSPECTION_VERSION = 1
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inspection:
    """The sizes of one submodel for one batch. `submodels/capacity.py` says what is counted.

    Attributes:
        submodel: The spec.
        params: Trained parameters.
        activations: Output elements of convolution and linear layers.
        macs: Multiply-accumulates of the forward pass.
        capacity: Trained parameters plus activations, divided by the same sum of the full model,
            as in EmbracingFL.
        bytes: Size of the weights that a device receives.
        exchanged_params: Numbers that a device sends back.
        layers: The form of each layer in the submodel, and the reason for this form.
        note: A warning if the submodel hardly saves anything; else empty.
    """

    submodel: str
    params: int
    activations: int
    macs: int
    capacity: float
    bytes: int
    exchanged_params: int
    layers: tuple[LayerDecision, ...]
    note: str = ""


@dataclass(frozen=True)
class NotPossible:
    """A submodel that is not possible for the model, with the error that gives the reason."""

    submodel: str
    cause: EdgeTailorError

    @property
    def error(self) -> str:
        """The reason, for people."""
        return str(self.cause)


@dataclass(frozen=True)
class CutPlace:
    """A place to cut a model, with figures of the slice after it.

    Attributes:
        module: The slice's first module with parameters. If the slice first reads a parameter of
            the model itself, this is the parameter's name.
        params: Trained parameters of the slice.
        activations: Output elements of its convolution and linear layers for one batch.
        capacity: Trained parameters plus activations, divided by the same sum of the full model.
        recorded: Numbers that the device stores on disk for each sample.
    """

    module: str
    params: int
    activations: int
    capacity: float
    recorded: int


def inspect(
    model: nn.Module,
    sample_shape: tuple[int, ...],
    specs: Sequence[str],
    batch: int,
    loss: str = TrainingConfig.loss,
) -> list[Inspection]:
    """Count the parameters, activations and operations of submodels.

    Use it to compare specs before an export. It needs no device. `plan` also predicts memory and
    time on a device.

    Args:
        model: The whole model.
        sample_shape: Shape of one sample, without the batch.
        specs: The specs of the submodels, for example `["full", "low-rank:0.25"]`.
        batch: Samples in a batch; the sizes are for one batch.
        loss: The loss that the model is trained with, as in `TrainingConfig`.

    Returns:
        The sizes of each submodel, in the order of `specs`: `params`, `activations`, `macs`,
        `capacity` and `bytes`, and the form of each layer.

    Raises:
        SpecError: A spec is wrong, or not possible for this model.
        ModelError: The model cannot be recorded.

    Examples:
        >>> import edgetailor as et
        >>> model = et.load_model("toolkit.models:digits_cnn")
        >>> [full, half] = et.inspect(model, (1, 8, 8), ["full", "slice:units.2"], batch=16)
        >>> full.capacity, round(half.capacity, 2)
        (1.0, 0.5)
    """
    training = TrainingConfig(batch_size=batch, loss=loss)
    with SharedRecording(model, sample_shape):
        full = split(model, "full", sample_shape, training)
        return [describe(split(model, spec, sample_shape, training), full) for spec in specs]


def inspect_each(
    model: nn.Module,
    sample_shape: tuple[int, ...],
    specs: Sequence[str],
    batch: int,
    loss: str = TrainingConfig.loss,
    format: Format = "onnx",
) -> list[Inspection | NotPossible]:
    """Like `inspect`, but report a submodel that is not possible instead of raising.

    A submodel that cannot be exported in `format` is not possible.

    Raises:
        ModelError: The full model is not possible.
    """
    training = TrainingConfig(batch_size=batch, loss=loss)
    with SharedRecording(model, sample_shape):
        logger.info("recording the model")
        full = split(model, "full", sample_shape, training)
        results: list[Inspection | NotPossible] = []
        for spec in specs:
            logger.info("splitting %s", spec)
            try:
                submodel = split(model, spec, sample_shape, training)
                check_operators(submodel, format)
                results.append(describe(submodel, full))
            except (SpecError, ModelError, ExportError) as error:
                results.append(NotPossible(spec, error))
        return results


def check_operators(submodel: Submodel, format: Format = "onnx") -> None:
    """Raise ExportError, as an export does, if an operator of the submodel cannot be exported.

    An operator that cannot be trained can sometimes be exported in a frozen layer. So if the model
    has a doubtful operator, the graphs are compiled: the compilation shows the errors. TFLite
    graphs are always compiled, because no list names the operators that TFLite lacks.
    """
    sources = (s.source for s in submodel.program.signatures if s.source is not None)
    if format == "tflite" or any(
        may_lack_form(name) for source in sources for name in operators(source)
    ):
        compile_graphs(submodel.program, format=format)


def describe(submodel: Submodel, full: Submodel) -> Inspection:
    """The sizes of `submodel`; its capacity is relative to `full`."""
    counts = submodel.counts
    return Inspection(
        submodel=str(submodel.spec),
        params=counts.params,
        activations=counts.activations,
        macs=counts.macs,
        capacity=counts.capacity(full.counts),
        bytes=submodel.bytes,
        exchanged_params=counts.exchanged,
        layers=submodel.layer_decisions,
        note=note(submodel, full),
    )


LITTLE = 0.1
"""If a submodel saves less than this share of the weights, it gets a note."""


def note(submodel: Submodel, full: Submodel) -> str:
    """Return a warning if `submodel` saves little compared with `full`; else an empty text.

    Submodels are checked only if they have factors or fewer channels. Submodels with a personal
    model are not checked.
    """
    tensors = submodel.program.tensors
    cut_down = any(e.factor is not None or e.part is not None for e in tensors)
    # A personal model costs extra by design, which needs no warning.
    cut_down = cut_down and not any(e.role == "personal" for e in tensors)
    capacity = submodel.counts.capacity(full.counts)
    weights = 1 - submodel.bytes / full.bytes
    little = weights < LITTLE and capacity > 1 - LITTLE
    if not cut_down or not (little or capacity > 1):
        return ""
    macs = 1 - submodel.counts.macs / full.counts.macs
    sentence = (
        f"{submodel.spec} saves {max(weights, 0):.0%} of the weights and {max(macs, 0):.0%} of the "
        f"MACs at capacity {capacity:.2f}"
    )
    if not little:
        return f"{sentence}: it sends less than the full model, but needs more memory in training."
    if submodel.spec.family == "width":
        return f"{sentence}; a smaller ratio saves more."
    return f"{sentence}; width or slice may suit this model better."


def cut_places(captured: Captured, batch: int) -> list[CutPlace]:
    """List the places where a model can be cut.

    If there are several places before a module, only the last is listed: `slice:MODULE` uses it.

    Args:
        captured: The whole model.
        batch: Samples in a batch.

    Returns:
        The places, from the input side to the output side.

    Raises:
        ModelError: The model cannot be cut at all.
        SpecError: The model changes its own parameters. Only `full` can train such a model.
    """
    refuse_changed_parameters(captured, "slice")
    logger.info("looking for places to cut")
    cutter = Cutter(captured)
    full, loads = cutter.load(cutter.captured.training, batch), cutter.loads(batch)
    places = []
    for point in cutter.points_by_module(batch).values():
        activations = count_activations(cutter.trained(point.position), batch)
        places.append(
            CutPlace(
                module=point.module,
                params=loads[point.position] - activations,
                activations=activations,
                capacity=loads[point.position] / full,
                recorded=point.recorded,
            )
        )
    return places


def as_json(
    captured: Captured,
    inspections: Sequence[Inspection | NotPossible],
    places: Sequence[CutPlace] | None = None,
    trained: TrainedOutputs | None = None,
) -> dict[str, object]:
    """The document that `inspect --json` prints. With `--cut-points` it also has the `places`."""
    document: dict[str, object] = {
        "version": INSPECTION_VERSION,
        "sample": {
            "shape": captured.sample_shape,
            "dtype": captured.sample_dtype,
            "below": captured.sample_limit,
        },
        "output": captured.output_shape,
        "submodels": [_entry(inspection) for inspection in inspections],
    }
    if trained is not None:
        document["outputs"] = [asdict(output) for output in trained.outputs]
        document["without_gradient"] = trained.without_gradient
    if places is not None:
        document["cut_points"] = [asdict(cut) for cut in places]
    return document


def _entry(inspection: Inspection | NotPossible) -> dict[str, object]:
    """One entry of the document."""
    if isinstance(inspection, Inspection):
        return asdict(inspection)
    return {
        "submodel": inspection.submodel,
        "error": inspection.error,
        "code": inspection.cause.code,
    }
