"""A model that several families cut is recorded once, and each family still gets its own graphs."""

import pytest
import torch
from torch import nn

from edgetailor import split
from exporters.recording import capture as recording
from exporters.recording.capture import SharedRecording, capture
from refusals import refused

SPECS = ("width:0.5", "full", "low-rank:0.5,keep=0", "slice:2", "width:0.25")


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def test_submodels_of_one_recording_are_those_of_their_own(seed: int) -> None:
    torch.manual_seed(seed)
    net = model()
    alone = [split(net, spec, (6,)) for spec in SPECS]
    with SharedRecording(net, (6,)):
        together = [split(net, spec, (6,)) for spec in SPECS]
    for own, shared in zip(alone, together, strict=True):
        assert own.counts == shared.counts
        assert own.program.tensors == shared.program.tensors
        nodes = [
            [str(n) for n in s.program.signatures[0].source.graph.nodes] for s in (own, shared)
        ]
        assert nodes[0] == nodes[1]


def test_the_model_is_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = []

    def record(net: nn.Module, *args: object) -> object:
        recorded.append(net)
        return original(net, *args)

    original = recording.record_and_check
    monkeypatch.setattr(recording, "record_and_check", record)
    net, other = model(), model()
    with SharedRecording(net, (6,)), SharedRecording(net, (6,)):
        assert capture(net, (6,)) is capture(net, (6,))
        capture(other, (6,))
        with refused("model.wrong-input-shape"):
            capture(net, (5,))
    assert recorded == [net, other, net]
    capture(net, (6,))
    assert len(recorded) == 4
