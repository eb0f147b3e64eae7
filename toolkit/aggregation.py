"""Folding updates of any shape back into one global model.

Every update is recovered to full-shape global tensors by its family, and each tensor is averaged
over the devices that trained it. Nothing here knows how updates arrive.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from device_agent.manifest import TensorEntry
from device_agent.update import UpdateRecord
from profiles.errors import UpdateError
from toolkit.families import family_named
from toolkit.spec import parse_spec
from toolkit.submodel import Family, Shapes, factors_of
from toolkit.weights import GlobalModel

Received = tuple[UpdateRecord, Mapping[str, np.ndarray]]
"""An update as `read_update` returns it."""


@dataclass
class Mean:
    """Streaming weighted mean, tensor by tensor over those that were added.

    Laws: the result does not depend on the order of `add`, and merging two means equals adding
    everything to one. Holds one float64 copy of what was added, however many there were.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)

    def add(self, tensors: Mapping[str, Tensor], weight: float) -> None:
        """Take in `tensors` with `weight` > 0."""
        for name, value in tensors.items():
            term = value.double() * weight
            if name in self.sums:
                self.sums[name] += term
            else:
                self.sums[name] = term
            self.weights[name] = self.weights.get(name, 0.0) + weight

    def merge(self, other: "Mean") -> None:
        """Take in all that `other` took in."""
        for name, total in other.sums.items():
            self.sums[name] = self.sums[name] + total if name in self.sums else total.clone()
            self.weights[name] = self.weights.get(name, 0.0) + other.weights[name]

    def result(self) -> dict[str, Tensor]:
        """The means so far, float32."""
        return {name: (total / self.weights[name]).float() for name, total in self.sums.items()}


@dataclass
class FactorMean:
    """The updates of one submodel whose factors are averaged as they come (TDPFed's AFM)."""

    family: Family
    table: tuple[TensorEntry, ...]
    mean: Mean = field(default_factory=Mean)
    weight: float = 0.0


def aggregate(model: GlobalModel, updates: Iterable[Received]) -> GlobalModel:
    """The next global model: each tensor the mean over those who trained it, by samples.

    Factors of families that keep them are averaged first, enter the mean as one composed update
    with their devices' joint weight, and are then fitted anew to the resulting model. Tensors that
    nobody trained stay as they are. Raises UpdateError for an update that does not fit `model`.
    """
    shapes = {name: tuple(value.shape) for name, value in model.tensors.items()}
    mean = Mean()
    kept_means: dict[str, FactorMean] = {}
    for record, arrays in updates:
        spec = parse_spec(record.submodel)
        family = family_named(spec.family)
        tensors = {name: torch.from_numpy(np.asarray(array)) for name, array in arrays.items()}
        check_stands_for(record, shapes)
        if family.averages_factors:
            group = kept_means.setdefault(
                f"{spec.family}:{spec.size}", FactorMean(family, record.tensors)
            )
            if group.table != record.tensors:
                raise UpdateError(f"Two updates of {record.submodel!r} have different factors.")
            group.mean.add(tensors, record.samples)
            group.weight += record.samples
        else:
            mean.add(recover(family, tensors, record.tensors, shapes), record.samples)
    for group in kept_means.values():
        recovered = recover(group.family, group.mean.result(), group.table, shapes)
        mean.add(recovered, group.weight)
    if not mean.sums:
        raise UpdateError("There is no update to aggregate; give at least one.")
    tensors = {**model.tensors, **mean.result()}
    kept = {
        key: group.family.refit(group.mean.result(), group.table, tensors)
        for key, group in kept_means.items()
    }
    return GlobalModel(tensors, {**model.kept, **kept})


def recover(
    family: Family, tensors: Mapping[str, Tensor], table: tuple[TensorEntry, ...], shapes: Shapes
) -> dict[str, Tensor]:
    """What an update says of the global model. Raises UpdateError where its shapes do not fit."""
    try:
        recovered = family.recover(tensors, table, shapes)
    except (RuntimeError, KeyError, ValueError) as error:
        raise UpdateError(f"An update's factors do not fit the global model: {error}.") from None
    for name, value in recovered.items():
        if tuple(value.shape) != shapes[name]:
            raise UpdateError(
                f"An update gives {name!r} the shape {tuple(value.shape)}; "
                f"the global model has {shapes[name]}."
            )
    return recovered


def check_stands_for(record: UpdateRecord, shapes: Shapes) -> None:
    """Raise UpdateError where an update stands for tensors that the global model lacks."""
    factors_of({entry.name: torch.empty(0) for entry in record.tensors}, record.tensors)
    for entry in record.tensors:
        if entry.stands_for not in shapes:
            raise UpdateError(
                f"The update of {record.submodel!r} trains {entry.stands_for!r}, which the global "
                "model does not have: it belongs to another model."
            )
    if record.samples < 1:
        raise UpdateError(f"An update of {record.samples} samples has no weight.")
