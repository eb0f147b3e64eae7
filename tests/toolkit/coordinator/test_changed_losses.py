"""The code of the user's own loss changes between two starts of a federation or a simulation."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from refusals import refused
from toolkit.coordinator.server import Server
from toolkit.coordinator.settings_check import other_loss
from toolkit.coordinator.startup import serve
from toolkit.simulation.comparison import compare
from toolkit.simulation.simulate import simulate

LOSS = """import edgetailor as et
from torch import nn

def model():
    return nn.Linear(3, 2)

MARGIN = 1.0

def distance(output, numbers):
    return (output - numbers).square()

@et.loss(et.numbers(2))
def loss(output, numbers):
    return distance(output, numbers).mean(1) + MARGIN
"""
OTHERS = {
    "helper": LOSS.replace(".square()", ".abs()"),
    "number": LOSS.replace("MARGIN = 1.0", "MARGIN = 2.0"),
    "metric": LOSS.replace("+ MARGIN", "+ MARGIN, {'error': output[:, 0]}"),
}
SAME = LOSS.replace("import edgetailor", '"""A comment."""\n\n\nimport edgetailor').replace(
    "distance", "square_of_error"
)
FILE = """
model = "changed_loss:model"
input_shape = [3]
rounds = 1
held_out = "held_out.npz"
{server}
[training]
loss = "changed_loss:loss"
epochs = 1
{simulation}
[[devices]]
name = "board"
submodel = "full"
count = 2
"""
SIMULATION = '[simulation]\ndata = "held_out.npz"\nparticipation = 1.0\n'


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Writes the module of the loss, as if the next start were in a new process."""
    rows = np.random.default_rng(0).standard_normal((12, 5), dtype=np.float32)
    np.savez(tmp_path / "held_out.npz", x=rows[:, :3], y=rows[:, 3:])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(text: str) -> None:
        Path("changed_loss.py").write_text(text)
        sys.modules.pop("changed_loss", None)
        importlib.invalidate_caches()

    yield write
    sys.modules.pop("changed_loss", None)


@pytest.mark.parametrize("change", OTHERS)
def test_serve_refuses_another_loss_of_the_same_name(
    write: Callable[[str], None], change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml = Path("fleet.toml")
    toml.write_text(FILE.format(server="port = 0", simulation=""))
    monkeypatch.setattr(Server, "run", Server.close)
    for text in (LOSS, SAME):
        write(text)
        serve(toml)
    write(OTHERS[change])
    with refused("state.other-federation", key="training.loss", loss="changed_loss:loss"):
        serve(toml)
    write(LOSS)
    serve(toml)


def test_a_simulation_does_not_continue_with_another_loss(write: Callable[[str], None]) -> None:
    toml = Path("fleet.toml")
    toml.write_text(FILE.format(server="", simulation=SIMULATION))
    for text, out in ((LOSS, "a"), (OTHERS["number"], "b")):
        write(text)
        simulate(toml, out)
    write(SAME)
    assert len(simulate(toml, "a", rounds=2)) == 2
    with refused("simulation.other-settings", key="training.loss"):
        simulate(toml, "b")
    simulate(toml, "b", force=True, rounds=2)
    (row,) = compare([Path("a")])
    assert row.final.mean > 1
    write(OTHERS["helper"])
    simulate(toml, "c", rounds=2)
    assert len(compare([Path("a"), Path("c")])) == 2


def test_another_version_of_torch_may_record_a_loss_otherwise() -> None:
    assert other_loss("torch-2.8 one", "torch-2.8 two")
    assert not other_loss("torch-2.8 one", "torch-2.9 two")
