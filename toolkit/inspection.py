"""What `edgetailor inspect` shows: the size of submodels beside the full model."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from torch import nn

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


def as_json(inspections: Sequence[Inspection]) -> dict[str, object]:
    """The document that `inspect --json` prints."""
    return {"version": INSPECTION_VERSION, "submodels": [asdict(i) for i in inspections]}
