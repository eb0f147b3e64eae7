"""`edgetailor rounds`, `export-model`, `rollback`, `backup` and `restore`."""

import json
from pathlib import Path

import pytest

from commands import edgetailor, refused
from device_agent.formats.protocol.fleet import RoundResult
from toolkit.coordinator.storage.coordinator_store import Store

TABLE = """\
round  accuracy    loss  updates         model  note
0        10.00%  2.0000        0  not kept
1        90.00%  1.5000        3  {1}  best
2        50.00%  1.0000        3  {2}  current
The best round has the best held-out accuracy.
"""


@pytest.fixture
def state(tmp_path: Path) -> Path:
    store = Store(tmp_path / "state", 1)
    for round_, accuracy in enumerate([0.1, 0.9, 0.5]):
        found = RoundResult(
            round=round_, accuracy=accuracy, loss=2 - round_ / 2, updates=3 * (round_ > 0)
        )
        store.add_result(found, f"model {round_}".encode())
    store.close()
    return tmp_path / "state"


def test_rounds_and_going_back(state: Path, tmp_path: Path) -> None:
    done = edgetailor("rounds", "state", "--json", cwd=tmp_path)
    rounds = json.loads(done.stdout)["rounds"]
    hashes = {one["round"]: one["model"][:12] for one in rounds}
    shown = edgetailor("rounds", "state", cwd=tmp_path)
    assert (shown.code, shown.stderr) == (0, "")
    expected = TABLE.replace("{1}", hashes[1]).replace("{2}", hashes[2])
    assert [line.split() for line in shown.stdout.splitlines()] == [
        line.split() for line in expected.splitlines()
    ]
    assert max(map(len, shown.stdout.splitlines())) <= 80
    done = edgetailor("export-model", "state", "1", "one.safetensors", cwd=tmp_path)
    assert (done.code, (tmp_path / "one.safetensors").read_bytes()) == (0, b"model 1")
    assert done.stderr == "one.safetensors contains the global model after round 1.\n"
    done = edgetailor("rollback", "state", "1", cwd=tmp_path).succeeded()
    assert done.stderr == (
        "Round 3 starts from the model of round 1, which is now in global.safetensors. If all "
        "`rounds` of the federation's file are over, set a higher number. If they ended "
        "early, change `early_stopping`.\n"
    )
    notes = [
        line.split()[5:] for line in edgetailor("rounds", "state", cwd=tmp_path).stdout.splitlines()
    ]
    assert notes[2:-1] == [["best,", "current"], []]
    store = Store(state, 1)
    store.add_result(RoundResult(round=3, accuracy=0.7, loss=1.0, updates=3), b"model 3")
    store.close()
    last = edgetailor("rounds", "state", cwd=tmp_path).stdout.splitlines()[-2]
    assert last.endswith("current, from round 1")
    (state / "files" / json.loads((state / "federation.json").read_bytes())["model"]).unlink()
    last = edgetailor("rounds", "state", cwd=tmp_path).stdout.splitlines()[-2]
    assert last.split()[4:] == ["lost", "current,", "from", "round", "1"]
    assert "is not kept" in refused(tmp_path, "rollback", "state", "0")


def test_backup_and_restore(state: Path, tmp_path: Path) -> None:
    done = edgetailor("backup", "state", "copy", cwd=tmp_path)
    assert (done.code, done.stderr) == (0, "copy contains a backup of state.\n")
    assert "exists already" in refused(tmp_path, "backup", "state", "copy")
    assert "is not an empty folder" in refused(tmp_path, "restore", "copy", "state")
    assert edgetailor("restore", "copy", "new", cwd=tmp_path).code == 0
    store = Store(tmp_path / "new")
    assert store.model() == b"model 2"
    store.close()
