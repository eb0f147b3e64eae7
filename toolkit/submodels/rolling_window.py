"""Submodels that have different elements of the global tensors in each round."""

import dataclasses
from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace
from torch import Tensor

from device_agent.formats.manifest import TensorEntry
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.submodel import Submodel
from toolkit.submodels.tensor_slices import take_slice


def in_round(submodel: Submodel, round_: int) -> Submodel:
    """Return `submodel` as devices train it in round `round_` (from 1).

    `Submodel.windows` says which part of the global tensors the submodel has in this round. Graphs
    and shapes are the same in all rounds.
    """
    if submodel.windows is None:
        return submodel
    parts = submodel.windows(round_)
    tensors = tuple(
        replace(entry, part=parts[entry.name]) if entry.name in parts else entry
        for entry in submodel.program.tensors
    )
    stored = [entry for entry in tensors if entry.stored]
    program = dataclasses.replace(submodel.program, tensors=tensors)
    return dataclasses.replace(submodel, program=program, cut=partial(cut_parts, stored))


def cut_parts(entries: Sequence[TensorEntry], weights: GlobalModel) -> dict[str, Tensor]:
    """Take the value of each tensor in `entries` from the global model: a part or the whole."""
    return {
        entry.name: weights.tensors[entry.name]
        if entry.part is None
        else take_slice(weights.tensors[entry.name], entry.part)
        for entry in entries
    }
