"""What the coordinator keeps is on the disk before it says so: a power cut loses nothing."""

import os
from pathlib import Path

import pytest

from toolkit.coordinator.database.database import Database
from toolkit.coordinator.storage.blobs import Blobs


def test_commits_are_flushed(tmp_path: Path) -> None:
    """SQLite's own word for it: 2 is FULL."""
    database = Database(tmp_path / "state.sqlite3")
    with database.transaction() as db:
        assert db.execute("PRAGMA synchronous").fetchone() == (2,)
        assert db.execute("PRAGMA journal_mode").fetchone() == ("truncate",)
    database.close()


def test_files_are_flushed_before_they_have_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First all of the content, then the name of the file in its folder."""
    flushed: list[tuple[bool | bytes, list[str]]] = []

    def fsync(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        named = sorted(file.name for file in blobs.folder.iterdir() if file.name[0] != ".")
        flushed.append((path.is_dir() or path.read_bytes(), named))

    blobs = Blobs(tmp_path / "files")
    monkeypatch.setattr(os, "fsync", fsync)
    entry = blobs.put(b"content")
    assert flushed[:2] == [(b"content", []), (True, [entry.sha256])]
