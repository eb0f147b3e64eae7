"""Folders are written whole or not at all."""

import multiprocessing
from pathlib import Path

import pytest

from bundles import everything
from device_agent.formats import atomic_files
from device_agent.formats.atomic_files import exchange, write_folder
from killing import Job, die_at

OLD, NEW = {"a": b"old a", "b": b"old b"}, {"a": b"new a", "c": b"new c"}


def write_and_die(out: Path, write: int, before: bool) -> None:
    """Replace the folder `out` in this process, which is killed at its write number `write`."""
    die_at(Job("", "", "", stop=write, before=before))
    write_folder(out, NEW, force=True)


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_a_folder_is_old_or_new_at_every_kill(tmp_path: Path, exists: bool, before: bool) -> None:
    """What was there is never lost, and no folder is half written."""
    context = multiprocessing.get_context("fork")
    write, code, seen = 0, -9, set()
    while code == -9:
        write += 1
        out = tmp_path / str(write) / "out"
        if exists:
            write_folder(out, OLD)
        process = context.Process(target=write_and_die, args=(out, write, before))
        process.start()
        process.join(30)
        code = process.exitcode
        files = everything(out) if out.exists() else {}
        assert files in ((OLD, NEW) if exists else ({}, NEW))
        seen.add(files == NEW)
    assert code == 0
    assert (write > 5, seen) == (True, {False, True})
    # Only a kill leaves files behind.
    assert [path.name for path in (tmp_path / str(write)).iterdir()] == ["out"]


def test_systems_that_cannot_exchange_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not exchange(tmp_path / "none", tmp_path)
    monkeypatch.setattr(atomic_files, "exchange", lambda *_: False)
    write_folder(tmp_path / "out", OLD)
    write_folder(tmp_path / "out", NEW, force=True)
    assert everything(tmp_path / "out") == NEW
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
