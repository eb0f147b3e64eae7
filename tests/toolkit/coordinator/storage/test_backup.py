"""Backups of a federation, taken while it runs, and what is restored from them."""

import errno
import fcntl
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from bundles import everything
from commands import run_code
from device_agent.formats.protocol.fleet import RoundResult
from refusals import refused
from toolkit.coordinator.storage.backup import backup, restore
from toolkit.coordinator.storage.coordinator_store import Store
from toolkit.coordinator.storage.saved_rounds import export_model, roll_back, saved_rounds
from vector_fleet import (
    VectorModel,
    configured,
    enrol,
    joined,
    running,
    send_all,
    send_trained,
    task,
)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backup of a federation that runs: in round 2, with the update of one device."""
    folder = tmp_path_factory.mktemp("copied")
    with running(configured(folder / "c")) as server:
        links = enrol(server, folder)
        send_all(links, 1, folder)
        send_trained(links["desktop-1"], 2, folder / "two")
        backup(folder / "c" / "state", folder / "backup")
        for name in ("desktop-2", "board-1"):
            send_trained(links[name], 2, folder / f"{name}-2")
        task(links["board-1"])
    return folder


def test_a_restored_federation_continues(copied: Path, tmp_path: Path) -> None:
    config = configured(tmp_path / "c")
    restore(copied / "backup", config.state)
    assert (config.state / "operator.token").stat().st_mode & 0o777 == 0o600
    model = VectorModel()
    with running(config, model) as server:
        links = [joined(server, copied / str(n)) for n in range(3)]
        assert task(links[1]).round == 2
        assert links[0].work().state == "wait"  # its update is in the backup
        for number in (1, 2):
            send_trained(links[number], 2, tmp_path / str(number))
        assert task(links[0]).round == 3
    assert model.folded == [3]
    expected = np.full(1000, 2, np.float32)
    np.testing.assert_array_equal(load_file(config.state / "global.safetensors")["w"], expected)


def test_places_that_are_refused(copied: Path, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "mine").touch()
    with refused("backup.state-not-empty", path=str(tmp_path / "state")):
        restore(copied / "backup", tmp_path / "state")
    store = Store(tmp_path / "used")
    with refused("backup.state-not-empty", path=str(tmp_path / "used")):
        restore(copied / "backup", tmp_path / "used")
    store.close()
    inside = copied / "backup" / "state"
    with refused("file.in-state-folder", path=str(inside)):
        restore(copied / "backup", inside)
    assert not inside.exists()
    with refused("backup.not-a-backup", path=str(tmp_path / "used")):  # swapped
        restore(tmp_path / "used", copied / "backup")
    with refused("state.no-federation", path=str(tmp_path / "new")):
        backup(tmp_path / "new", copied / "c" / "state")
    with refused("file.exists", path=str(copied / "backup")):
        backup(copied / "c" / "state", copied / "backup")
    with refused("state.no-federation", path=str(tmp_path / "state")):
        backup(tmp_path / "state", tmp_path / "b")
    with refused("backup.not-a-backup", path=str(tmp_path)):
        restore(tmp_path, tmp_path / "new")
    backup(copied / "c" / "state", tmp_path / "b")
    backup(copied / "c" / "state", tmp_path / "b", force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "state", "used"]


def test_a_backup_replaces_only_backups(copied: Path, tmp_path: Path) -> None:
    state = tmp_path / "federation" / "state"
    restore(copied / "backup", state)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").write_text("all of it")
    (tmp_path / "link").symlink_to(state)
    before = everything(tmp_path)
    for out in (state, state.parent, state / "copies" / "monday", tmp_path / "link"):
        with refused("file.in-state-folder", path=str(out)):
            backup(state, out, force=True)
    shutil.copytree(copied / "backup", tmp_path / "mixed")
    (tmp_path / "mixed" / "notes").touch()
    before = everything(tmp_path)
    for out in (tmp_path / "mine", tmp_path / "mine" / "thesis", tmp_path / "mixed"):
        with refused("backup.replaces-other", path=str(out)):
            backup(state, out, force=True)
    with refused("file.in-state-folder"):
        export_model(state, 0, state / "state.sqlite3", force=True)
    assert everything(tmp_path) == before


def test_empty_folders_are_filled_and_stay(copied: Path, tmp_path: Path) -> None:
    """They may be mounted volumes, which cannot be renamed."""
    for name in ("backup", "state"):
        (tmp_path / name / "lost+found").mkdir(parents=True)
        held = os.open(tmp_path / name, os.O_RDONLY)
        if name == "backup":
            backup(copied / "c" / "state", tmp_path / name, force=True)
        else:
            restore(copied / "backup", tmp_path / name)
        assert sorted(os.listdir(held)) == sorted(os.listdir(tmp_path / name))
        os.close(held)
    Store(tmp_path / "state").close()


def test_a_backup_removes_what_a_kill_left_of_an_earlier_one(copied: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    restore(copied / "backup", state)
    kill_in_backup = (
        "import os, pathlib, toolkit.coordinator.storage.backup as b; "
        "b._check_contents = lambda made: os.kill(os.getpid(), 9); "
        f"b.backup(pathlib.Path({str(state)!r}), pathlib.Path({str(tmp_path / 'copy')!r}))"
    )
    for _ in range(2):
        assert run_code(kill_in_backup).code == -9
    left = [path for path in tmp_path.iterdir() if path != state]
    assert [path.stat().st_mode & 0o777 for path in left] == [0o700, 0o700]
    mine = [tmp_path / ".copy.mine", tmp_path / ".copy.old.mine", tmp_path / ".copying"]
    for path in mine:
        path.mkdir()
    busy = os.open(left[0], os.O_RDONLY)
    fcntl.flock(busy, fcntl.LOCK_EX)  # as another backup does
    backup(state, tmp_path / "copy")
    os.close(busy)
    assert set(tmp_path.iterdir()) == {state, tmp_path / "copy", *mine, left[0]}


def test_a_backup_is_not_served(copied: Path, tmp_path: Path) -> None:
    shutil.copytree(copied / "backup", tmp_path / "b")
    with refused("state.is-backup", path=str(tmp_path / "b")):
        Store(tmp_path / "b")
    with refused("state.is-backup"):
        roll_back(tmp_path / "b", 0)
    restore(tmp_path / "b", tmp_path / "state")


def test_a_full_disk_is_named(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "full", str(source), None, str(target))

    monkeypatch.setattr(shutil, "copy", full)
    for act in (lambda: backup(copied / "c" / "state", tmp_path / "b"),
                lambda: restore(copied / "backup", tmp_path / "b")):  # fmt: skip
        with refused("backup.not-writable", "Make room", path=str(tmp_path / "b"), errno="ENOSPC"):
            act()
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_backup_is_refused(copied: Path, tmp_path: Path) -> None:
    files = [path for path in (copied / "backup").rglob("*") if path.is_file()]
    assert len(files) > 10
    for name in [str(path.relative_to(copied / "backup")) for path in files]:
        shutil.rmtree(tmp_path / "b", ignore_errors=True)
        shutil.copytree(copied / "backup", tmp_path / "b")
        (tmp_path / "b" / name).write_bytes(b"?")
        code = "backup.not-a-backup" if name == "backup.json" else "backup.damaged-file"
        with refused(code):
            restore(tmp_path / "b", tmp_path / "state")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b"]


def test_a_damaged_federation_has_no_backup(copied: Path, tmp_path: Path) -> None:
    restore(copied / "backup", tmp_path / "state")
    path = next(iter((tmp_path / "state" / "files").iterdir()))
    path.write_bytes(b"?")
    with refused("backup.damaged-file", path=str(path)):
        backup(tmp_path / "state", tmp_path / "b")
    path.unlink()
    with refused("backup.damaged-file", path=str(path)):
        backup(tmp_path / "state", tmp_path / "b")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["state"]


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_a_lost_model_of_an_earlier_round_does_not_end_backups(tmp_path: Path, how: str) -> None:
    store = Store(tmp_path / "state")
    for round_ in range(3):
        quality = RoundResult(round=round_, accuracy=0.5, loss=1.0, updates=0)
        store.add_result(quality, f"model {round_}".encode())
    path = store.blobs.path(store.history.models()[1])
    store.close()
    path.unlink() if how == "missing" else path.write_bytes(b"?")
    Store(tmp_path / "state").close()  # what `serve` begins with
    assert [saved.kept for saved in saved_rounds(tmp_path / "state")] == [True, False, True]
    backup(tmp_path / "state", tmp_path / "b")


def test_every_backup_of_a_busy_federation_is_of_one_moment(tmp_path: Path) -> None:
    """Round N's model is "model N": a backup has the model that its history ends with."""
    store = Store(tmp_path / "state", 1)
    ending = threading.Event()

    def write() -> None:
        round_ = 0
        while not ending.is_set():
            quality = RoundResult(round=round_, accuracy=0.5, loss=1.0, updates=0)
            store.add_result(quality, f"model {round_}".encode())
            round_ += 1

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    try:
        while not store.history.results():
            pass
        for number in range(5):
            backup(tmp_path / "state", tmp_path / f"b{number}")
            restore(tmp_path / f"b{number}", tmp_path / f"s{number}")
            copy = Store(tmp_path / f"s{number}")
            last = copy.history.results()[-1].round
            assert copy.model() == f"model {last}".encode()
            seen.add(last)
            copy.close()
    finally:
        ending.set()
        writer.join()
        store.close()
    assert len(seen) == 5
