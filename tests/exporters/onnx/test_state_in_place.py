"""Training steps that write new state over old state give the same numbers as those that do not."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from device_agent.runtime.onnx_runtime import OnnxSession
from exporters.memory.liveness import METADATA, VIEWS, execution_order, in_place_of
from exporters.memory.onnx_footprint import footprint
from exporters.memory.static_shapes import at_batch
from exporters.onnx import state_in_place
from exporters.onnx.onnx_writer import to_onnx
from exporters.programs.program import ProgramSignature
from models_for_tests import INPUT_SHAPE, smooth_cnn, tied_layers
from parameters import half_quick, some_long
from toolkit.submodels.hyperparameters import Optimizer
from training_steps import drawn, train_step

BATCH = 4
KINDS = ("weight", "bias")


def attention() -> nn.Module:
    return nn.Sequential(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True),
        nn.Flatten(),
        nn.Linear(40, 4),
    )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(3, 5, 2, batch_first=True), nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(x)[0][:, -1])  # type: ignore[no-any-return]


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutions": (smooth_cnn, INPUT_SHAPE),
    "tied": (tied_layers, INPUT_SHAPE),
    "attention": (attention, (5, 8)),
    "recurrent": (Recurrent, (6, 3)),
}


def step_of(model: nn.Module, shape: tuple[int, ...], **training: object) -> ProgramSignature:
    return train_step(model, shape, batch_size=BATCH, momentum=0.9, weight_decay=0.01, **training)


def check_the_same_numbers(signature: ProgramSignature, graph: bytes, folder: Path) -> None:
    """Three steps over the old state, and three that return new arrays."""
    file = folder / "train.onnx"
    file.write_bytes(graph)
    session = OnnxSession(file, threads=1)
    states = {port.state: port.name for port in signature.inputs if port.state is not None}
    names = in_place_of(graph)
    over = {p.name: states[p.state] for p in signature.outputs if p.state and p.name in names}
    apart = drawn(signature, BATCH, np.random.default_rng(7))
    within = {name: value.copy() for name, value in apart.items()}
    for _ in range(3):
        expected, came = session.run(apart), session.run(within, over)
        assert expected.keys() == came.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(came[name], value, err_msg=name)
        for name, source in over.items():
            assert came[name] is within[source]
        for port in signature.outputs:
            if port.state is not None:
                apart[states[port.state]] = expected[port.name]
                within[states[port.state]] = came[port.name]


def missed_readers(graph: bytes, overwritten: str, old: str) -> list[str]:
    """Nodes that read the memory of `old` and that the node of `overwritten` does not wait for."""
    nodes = list(onnx.load_from_string(graph).graph.node)
    makers = {output: node for node in nodes for output in node.output}
    waited, left = set(), [overwritten]
    while left:
        name = left.pop()
        if name in makers and name not in waited:
            left += read(makers[name])
        waited.add(name)
    missed, memory = [], {old}
    for node in nodes:  # in the order of the file, so that views come after what they show
        if memory.intersection(read(node)):
            if node.op_type in VIEWS | {"Transpose"}:
                memory.update(node.output)
            elif not waited.intersection(node.output):
                missed.append(node.name)
    return missed


def read(node: onnx.NodeProto) -> list[str]:
    """What `node` and the bodies of its loops read."""
    inside = [n for a in node.attribute if a.HasField("g") for n in a.g.node]
    return [*node.input, *(name for inner in inside for name in read(inner))]


@pytest.mark.parametrize("name", half_quick(some_long(MODELS, "recurrent", "attention")))
def test_new_state_over_the_old_changes_no_number(
    name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_in_place, "LEAST_BYTES", 0)
    torch.manual_seed(seed)
    make, shape = MODELS[name]
    signature = step_of(make(), shape)
    graph = to_onnx(signature)
    states = {port.state: port.name for port in signature.inputs}
    overwritten = in_place_of(graph)
    for port in signature.outputs:
        if port.state is not None:
            assert port.name in overwritten, port.name
            assert missed_readers(graph, port.name, states[port.state]) == []
    check_the_same_numbers(signature, graph, tmp_path)


def test_layers_are_updated_one_after_the_other() -> None:
    """The gradient of a small bias is an activation that must not wait for the other layers."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(4)]
    graph = to_onnx(step_of(nn.Sequential(*layers), (3, 128)))
    order = execution_order(at_batch(onnx.load_from_string(graph), BATCH).graph)
    names = [value.name for node in order for value in node.outputs]
    updates = [name for name in names if name in {f"{n}.0.{p}+" for n in range(4) for p in KINDS}]
    assert [int(name[0]) for name in updates] == [3, 3, 2, 2, 1, 1, 0, 0]


@pytest.mark.parametrize("optimizer", half_quick(["nesterov", "adam", "adamw"]))
def test_other_optimizers(
    optimizer: Optimizer, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_in_place, "LEAST_BYTES", 0)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    signature = step_of(model, (6,), optimizer=optimizer)
    graph = to_onnx(signature)
    assert set(in_place_of(graph)) == {port.name for port in signature.outputs if port.state}
    check_the_same_numbers(signature, graph, tmp_path)


def test_what_is_read_after_the_update_is_not_written_over(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proximal term's state is the distance from the old weight to the new one."""
    monkeypatch.setattr(state_in_place, "LEAST_BYTES", 0)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    signature = step_of(model, (6,), proximal=0.1)
    graph = to_onnx(signature)
    assert "0.weight+" not in in_place_of(graph)
    assert "moved:0.weight+" in in_place_of(graph)
    check_the_same_numbers(signature, graph, tmp_path)


def test_a_large_weight_is_in_memory_once() -> None:
    """A small one may be there twice: what orders the nodes would take more than it saves."""
    model = nn.Sequential(nn.Linear(200, 300), nn.Tanh(), nn.Linear(300, 300), nn.Linear(300, 4))
    graph = to_onnx(step_of(model, (200,)))
    assert {"0.weight+", "2.weight+", "momentum:2.weight+"} < set(in_place_of(graph))
    assert "3.weight+" not in in_place_of(graph)
    without = onnx.load_from_string(graph)
    del without.metadata_props[:]
    saved = footprint(without.SerializeToString(), BATCH).process - footprint(graph, BATCH).process
    assert saved >= 2 * 4 * (200 * 300 + 300 * 300)
    assert [entry.key for entry in onnx.load_from_string(graph).metadata_props] == [METADATA]
