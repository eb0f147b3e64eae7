"""Runs a submodel's signatures as plain functions of float64 tensors, without any exporter."""

from collections.abc import Mapping

import torch
from torch import Tensor

from device_agent.formats.manifest import Record
from exporters.programs.program import ProgramSignature
from toolkit.submodels.submodel import Submodel

State = dict[str, Tensor]


def signature(submodel: Submodel, name: str) -> ProgramSignature:
    return next(s for s in submodel.program.signatures if s.name == name)


def first_state(submodel: Submodel, cut: Mapping[str, Tensor]) -> State:
    """The device's state at the start of a round: received tensors, and zeros for the rest."""
    return {
        e.name: cut[e.name].double() if e.stored else torch.zeros(e.shape, dtype=torch.float64)
        for e in submodel.program.tensors
    }


def call(submodel: Submodel, name: str, state: State, **fed: Tensor | float) -> State:
    """Run the signature `name`; state outputs are returned under the names of the tensors."""
    wanted = signature(submodel, name)
    feeds = {}
    for port in wanted.inputs:
        value = state[port.state] if port.state else fed[port.name]
        if isinstance(value, Tensor):
            feeds[port.name] = value
        else:
            feeds[port.name] = torch.tensor(value, dtype=torch.float64)
    out = wanted.function(feeds)
    return {port.state or port.name: out[port.name] for port in wanted.outputs}


def recorded(submodel: Submodel, state: State, x: Tensor) -> Tensor:
    """Run the multi-step forward pass on `x`; return `x` if the submodel records nothing."""
    for instruction in submodel.program.schedule:
        if isinstance(instruction, Record):
            x = call(submodel, instruction.signature, state, x=x)["output"]
    return x
