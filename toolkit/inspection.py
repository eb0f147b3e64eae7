"""What `edgetailor inspect` shows: the size of submodels beside the full model."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from torch import nn

from exporters.capture import capture
from toolkit.counting import activations, parameter_count
from toolkit.cutting import Cutter
from toolkit.splitting import split
from toolkit.submodel import Submodel, Treatment
from toolkit.training import TrainingConfig

INSPECTION_VERSION = 1


@dataclass(frozen=True)
class Inspection:
    """One submodel's sizes for one batch; `bytes` is what the device receives as weights.

    See `toolkit.counting` for what is counted.
    """

    submodel: str
    params: int
    activations: int
    macs: int
    capacity: float
    bytes: int
    exchanged_params: int
    layers: tuple[Treatment, ...]


@dataclass(frozen=True)
class CutPlace:
    """A place to cut a model, and the slice behind it for one batch.

    `module` is the slice's first module with parameters, `recorded` how many numbers the device
    keeps on disk for one sample.
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
        layers=submodel.treatments,
    )


def cut_places(model: nn.Module, sample_shape: tuple[int, ...], batch: int) -> list[CutPlace]:
    """Every place to cut `model`, from the input to the output side; see `toolkit.cutting`.

    Of several ahead of one module it is the last, which `slice:MODULE` takes.
    Raises ModelError where the model cannot be recorded or cannot be cut at all.
    """
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
    inspections: Sequence[Inspection], places: Sequence[CutPlace] | None = None
) -> dict[str, object]:
    """The document that `inspect --json` prints; with `--cut-points` it has the `places`."""
    document: dict[str, object] = {
        "version": INSPECTION_VERSION,
        "submodels": [asdict(i) for i in inspections],
    }
    if places is not None:
        document["cut_points"] = [asdict(place) for place in places]
    return document
