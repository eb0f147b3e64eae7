"""What `edgetailor inspect` shows: the size of submodels beside the full model."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from torch import nn

from exporters.programs.capture import capture
from profiles.errors import EdgeTailorError, ModelError, SpecError
from toolkit.splitting import split
from toolkit.submodels.capacity import activations, parameter_count
from toolkit.submodels.cut_points import Cutter
from toolkit.submodels.submodel import LayerDecision, Submodel
from toolkit.submodels.training_config import TrainingConfig

INSPECTION_VERSION = 1
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inspection:
    """One submodel's sizes for one batch; `bytes` is what the device receives as weights.

    See `submodels/capacity.py` for what is counted. `note` says so where hardly anything is saved.
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
    """A submodel that is not possible for the model, and the error that says why."""

    submodel: str
    cause: EdgeTailorError

    @property
    def error(self) -> str:
        """The reason, for people."""
        return str(self.cause)


@dataclass(frozen=True)
class CutPlace:
    """A place to cut a model, and the slice behind it for one batch.

    `module` is the slice's first module with parameters, or a parameter of the model's own that it
    reads first; `recorded` how many numbers the device keeps on disk for one sample.
    """

    module: str
    params: int
    activations: int
    capacity: float
    recorded: int


def inspect(
    model: nn.Module, sample_shape: tuple[int, ...], specs: Sequence[str], batch: int
) -> list[Inspection]:
    """Sizes of the submodels `specs` of `model`. Raises SpecError or ModelError as `split` does."""
    training = TrainingConfig(batch_size=batch)
    full = split(model, "full", sample_shape, training)
    return [describe(split(model, spec, sample_shape, training), full) for spec in specs]


def inspect_each(
    model: nn.Module, sample_shape: tuple[int, ...], specs: Sequence[str], batch: int
) -> list[Inspection | NotPossible]:
    """As `inspect`, with the reason in place of a submodel that `model` cannot give.

    Raises ModelError where the model can give none at all.
    """
    training = TrainingConfig(batch_size=batch)
    logger.info("recording the model")
    full = split(model, "full", sample_shape, training)

    def look(spec: str) -> Inspection | NotPossible:
        logger.info("splitting %s", spec)
        try:
            return describe(split(model, spec, sample_shape, training), full)
        except (SpecError, ModelError) as error:
            return NotPossible(spec, error)

    return [look(spec) for spec in specs]


def describe(submodel: Submodel, full: Submodel) -> Inspection:
    """The sizes of `submodel`, its capacity against `full`."""
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
"""Share of the full model's weights below which saving them is hardly worth a family's trouble."""


def note(submodel: Submodel, full: Submodel) -> str:
    """A word on a submodel with factors or fewer channels that gains little; empty for others."""
    tensors = submodel.program.tensors
    cut_down = any(e.factor is not None or e.part is not None for e in tensors)
    # A personal model is what one asks for, and what it costs.
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
        return f"{sentence}: less to send, more to hold in training than the full model."
    if submodel.spec.family == "width":
        return f"{sentence}; a smaller ratio saves more."
    return f"{sentence}; width or slice may suit this model better."


def cut_places(model: nn.Module, sample_shape: tuple[int, ...], batch: int) -> list[CutPlace]:
    """Every place to cut `model`, from the input to the output side.

    Of several ahead of one module it is the last, which `slice:MODULE` takes.
    Raises ModelError where the model cannot be recorded or cannot be cut at all.
    """
    logger.info("looking for places to cut")
    cutter = Cutter(capture(model, sample_shape))
    full = cutter.load(cutter.captured.training, batch)
    places = []
    for point in {point.module: point for point in cutter.points}.values():
        part = cutter.trained(point.place)
        places.append(
            CutPlace(
                module=point.module,
                params=parameter_count(part, cutter.captured.parameters),
                activations=activations(part, batch),
                capacity=cutter.load(part, batch) / full,
                recorded=point.recorded,
            )
        )
    return places


def as_json(
    inspections: Sequence[Inspection | NotPossible], places: Sequence[CutPlace] | None = None
) -> dict[str, object]:
    """The document that `inspect --json` prints; with `--cut-points` it has the `places`."""
    document: dict[str, object] = {
        "version": INSPECTION_VERSION,
        "submodels": [_entry(found) for found in inspections],
    }
    if places is not None:
        document["cut_points"] = [asdict(place) for place in places]
    return document


def _entry(found: Inspection | NotPossible) -> dict[str, object]:
    """One entry of the document."""
    if isinstance(found, Inspection):
        return asdict(found)
    return {"submodel": found.submodel, "error": found.error, "code": found.cause.code}
