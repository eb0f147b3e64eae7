"""`evaluate --leave-one-out`: a round without each device, against a plain mean in PyTorch."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save
from torch import nn
from torch.nn.functional import cross_entropy

from commands import edgetailor, refused
from device_agent.formats.atomic_files import fingerprint
from device_agent.formats.manifest import uploaded
from device_agent.formats.protocol.fleet import RoundResult
from toolkit.aggregation.federation import Federation
from toolkit.coordinator.closing.round_aggregation import RoundAggregation
from toolkit.coordinator.federation_file.round_keys import MOST_KEPT_UPDATES
from toolkit.coordinator.storage.coordinator_store import Store
from toolkit.coordinator.storage.retention import FULL_RECORDS, KEEP_UPDATES
from toolkit.submodels.hyperparameters import TrainingConfig
from updates import record_of
from vector_fleet import CONFIG as FLEET
from vector_fleet import configured, running

INPUTS, CLASSES, DEVICES = 6, 3, 4
NET = f"""
from torch import nn


def net():
    return nn.Sequential(nn.Linear({INPUTS}, 8), nn.Tanh(), nn.Linear(8, {CLASSES}))
"""
CONFIG = f"""
model = "leave_one_out_net:net"
input_shape = [{INPUTS}]
rounds = 1
held_out = "held_out.npz"
keep_updates = 1

[[devices]]
name = "board"
submodel = "full"
count = {DEVICES}
"""
BAD = "board-3"
"""The device whose update moves the model down."""
State = dict[str, torch.Tensor]


def net(state: State) -> nn.Module:
    model = nn.Sequential(nn.Linear(INPUTS, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    model.load_state_dict(state)
    return model.eval()


@pytest.fixture
def played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, dict[str, tuple[int, State]], tuple[torch.Tensor, torch.Tensor]]:
    """A federation after a round: its folder, updates with their samples, and held-out data."""
    (tmp_path / "leave_one_out_net.py").write_text(NET)
    (tmp_path / "federation.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    torch.manual_seed(3)
    federation = Federation("leave_one_out_net:net", (INPUTS,), TrainingConfig())
    first = {name: tensor.clone() for name, tensor in federation.module.state_dict().items()}
    x = torch.randn(200, INPUTS)
    y = net(first)(x).argmax(1)
    np.savez(tmp_path / "held_out.npz", x=x.numpy(), y=y.numpy())
    store = Store(tmp_path / "state")
    store.set_value(KEEP_UPDATES, "1")
    store.add_result(RoundResult(round=0, accuracy=1.0, loss=0.1, updates=0), federation.save())
    store.registry.set_token("board", "token", DEVICES, 1)
    table = uploaded(federation.submodel("full").program.tensors)
    updates: dict[str, tuple[int, State]] = {}
    for number in range(DEVICES):
        device, _ = store.registry.enrol("token", f"pi {number}", str(number), "{}", lambda _: None)
        moved = {name: t + 0.1 * torch.randn(t.shape) for name, t in first.items()}
        if device.id == BAD:
            moved = {name: -3 * tensor for name, tensor in moved.items()}
        data = save({entry.name: moved[entry.name] for entry in table})
        store.blobs.put(data)
        record = replace(record_of("full", 10 * (number + 1), table), file=fingerprint(data))
        store.add_update(1, device.id, record)
        updates[device.id] = (10 * (number + 1), moved)
    folding = RoundAggregation(federation, store, (x.numpy(), y.numpy()), 1)
    assert (folding.run(), folding.left_out) == (DEVICES, {})
    assert folding.quality is not None
    store.add_result(
        RoundResult(
            round=1, accuracy=folding.quality.accuracy, loss=folding.quality.loss, updates=DEVICES
        ),
        federation.save(),
    )
    store.remove_unnamed()
    store.close()
    return tmp_path, updates, (x, y)


def mean(updates: list[tuple[int, State]]) -> State:
    total = sum(samples for samples, _ in updates)
    return {
        name: sum((samples / total * state[name].double() for samples, state in updates)).float()
        for name in updates[0][1]
    }


def test_a_round_without_each_device(
    played: tuple[Path, dict[str, tuple[int, State]], tuple[torch.Tensor, torch.Tensor]],
) -> None:
    folder, updates, (x, y) = played
    done = edgetailor("evaluate", "federation.toml", "--leave-one-out", "--json", cwd=folder)
    assert done.code == 0, done.stderr
    found = json.loads(done.stdout)
    found["without"].append({**found, "device": None})
    for entry in found["without"]:
        others = [own for device, own in updates.items() if device != entry["device"]]
        with torch.no_grad():
            output = net(mean(others))(x).double()
        assert entry["loss"] == pytest.approx(float(cross_entropy(output, y)), rel=1e-5)
        assert entry["accuracy"] == float((output.argmax(1) == y).double().mean())
    assert found["without"][0]["device"] == BAD
    assert found["without"][0]["samples"] == updates[BAD][0]
    shown = edgetailor("evaluate", "federation.toml", "--leave-one-out", cwd=folder).stdout
    rows = [line.split() for line in shown.splitlines()]
    change = 100 * (found["without"][0]["accuracy"] - found["accuracy"])
    assert rows[3][:5] == [BAD, "(pi", "2)", "board", "30"]
    assert rows[3][-1] == f"{change:+.2f}"
    assert change > 10
    assert max(map(len, shown.splitlines())) <= 80


def test_what_is_needed_is_said(
    played: tuple[Path, dict[str, tuple[int, State]], tuple[torch.Tensor, torch.Tensor]],
) -> None:
    folder, _, _ = played
    asked = ("evaluate", "federation.toml", "--leave-one-out")
    assert "Round 0 aggregated no updates" in refused(folder, *asked, "--round", 0)
    assert "has no round 2" in refused(folder, *asked, "--round", 2)
    store = Store(folder / "state")
    store.set_value(KEEP_UPDATES, "0")
    store.remove_unnamed()
    store.close()
    assert "Set `keep_updates` in the federation's file" in refused(folder, *asked)


@pytest.mark.parametrize(("keep", "rounds"), [(0, 0), (1, 1), (3, 3)])
def test_the_last_rounds_keep_their_updates(
    played: tuple[Path, dict[str, tuple[int, State]], tuple[torch.Tensor, torch.Tensor]],
    keep: int,
    rounds: int,
) -> None:
    folder, _, _ = played
    store = Store(folder / "state")
    store.set_value(KEEP_UPDATES, str(keep))
    kept = 0
    for round_ in range(2, 7):
        store.remove_unnamed()
        kept += all(store.blobs.is_whole(sha256) for _, sha256, _ in store.updates(1)) and bool(
            store.updates(1)
        )
        result = RoundResult(round=round_, accuracy=1.0, loss=0.1, updates=0)
        store.add_result(result, b"model")
    store.close()
    assert kept == rounds


def test_the_coordinator_sets_how_many(tmp_path: Path) -> None:
    config = configured(tmp_path, f"keep_updates = 2\n{FLEET}")
    with running(config):
        pass
    store = Store(config.state)
    assert store.value(KEEP_UPDATES) == "2"
    store.close()


def test_records_are_kept_as_long_as_updates() -> None:
    assert MOST_KEPT_UPDATES == FULL_RECORDS
