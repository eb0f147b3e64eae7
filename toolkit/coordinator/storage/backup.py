"""A consistent copy of a state folder, taken while `serve` may run, and putting it back."""

import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from device_agent.formats.atomic_files import (
    fingerprint_file,
    refuse_existing,
    sync_folder,
    write_file,
)
from profiles.errors import InputError
from toolkit.coordinator.storage.coordinator_store import REFERENCED
from toolkit.coordinator.storage.federation_marker import Marker
from toolkit.coordinator.storage.folder_check import DATABASE, check_folder
from toolkit.coordinator.storage.folder_lock import FolderLock
from toolkit.coordinator.storage.recoverable import FILES, HISTORY, MODEL, has_hash
from toolkit.coordinator.storage.saved_rounds import reading

CONTENTS = "backup.json"
TOKENS = ("operator.token", "tokens")
ATTEMPTS = 10
"""How often a backup begins again because a round ended while it collected the files."""


def backup(state: Path, out: Path, force: bool = False) -> None:
    """Copy the federation in `state` to the new folder `out` and check the copy.

    Raises:
        InputError: If `state` holds no federation, if a file in it is missing or damaged, or if
            `out` exists and `force` is not set.
    """
    refuse_existing(out, force)
    for attempt in range(ATTEMPTS):
        with _new_folder(out) as made:
            try:
                _copy(state, made)
            except FileNotFoundError:  # the end of a round has removed a file
                if attempt < ATTEMPTS - 1:
                    continue
                raise
            _write_contents(made)
            _check_contents(made)
            check_folder(made)
            _put(made, out)
            return


def restore(copy: Path, state: Path) -> None:
    """Make the state folder `state` from the backup `copy`.

    Raises:
        InputError: If `copy` is not a whole backup, or if `state` is in use or not empty.
    """
    if state.exists():
        if not state.is_dir() or any(state.iterdir()):
            raise InputError(
                f"{state} is not an empty folder: give another place, or move it away first. "
                "Nothing was changed.",
                code="backup.state-not-empty",
                path=str(state),
            )
        FolderLock(state).release()
    _check_contents(copy)
    with _new_folder(state) as made:
        for name in _contents(copy):
            _copy_file(copy / name, made / name)
        check_folder(made)
        _put(made, state)


def _copy(state: Path, made: Path) -> None:
    """Copy the database at one moment, then the files that it names."""
    with reading(state) as source, closing(sqlite3.connect(made / DATABASE)) as target:
        source.backup(target)
        files = sorted({name for (name,) in target.execute(REFERENCED)})
        marker = Marker.of(target)
    os.chmod(made / DATABASE, 0o600)
    for sha256 in files:
        _copy_file(state / FILES / sha256, made / FILES / sha256)
        if not has_hash(made / FILES / sha256, sha256):
            raise InputError(
                f"{state / FILES / sha256} is damaged: there is no backup of a damaged federation. "
                "Start `edgetailor serve`: it says what can be recovered.",
                code="backup.damaged-file",
                path=str(state / FILES / sha256),
            )
    marker.write(made)
    if marker.model is not None:
        _copy_file(made / FILES / marker.model, made / MODEL)
    for name in TOKENS:
        for path in _files(state / name):
            _copy_file(path, made / path.relative_to(state))
    if (state / HISTORY).exists():
        _copy_file(state / HISTORY, made / HISTORY)


def _write_contents(made: Path) -> None:
    files = {str(path.relative_to(made)): fingerprint_file(path).sha256 for path in _files(made)}
    document = {"version": 1, "files": files}
    write_file(made / CONTENTS, json.dumps(document, indent=1).encode() + b"\n")


def _contents(copy: Path) -> dict[str, str]:
    """The files of a backup with their SHA-256. Raises InputError if it is none."""
    try:
        document = json.loads((copy / CONTENTS).read_bytes())
        found = {str(name): str(sha256) for name, sha256 in document["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise InputError(
            f"{copy} is not a backup: it has no readable {CONTENTS}. Give a folder that "
            "`edgetailor backup` made.",
            code="backup.not-a-backup",
            path=str(copy),
        ) from None
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in found):
        raise InputError(
            f"{copy / CONTENTS} names files outside of its folder. Give another backup.",
            code="backup.unsafe-name",
            path=str(copy),
        )
    return found


def _check_contents(copy: Path) -> None:
    """Raise InputError if a file of the backup is missing or damaged."""
    for name, sha256 in _contents(copy).items():
        if not has_hash(copy / name, sha256):
            raise InputError(
                f"{copy / name} is missing or damaged: this backup cannot be restored. Give "
                "another one. Nothing was changed.",
                code="backup.damaged-file",
                path=str(copy / name),
            )


def _files(place: Path) -> Iterator[Path]:
    if place.is_file():
        yield place
    elif place.is_dir():
        yield from (path for path in sorted(place.rglob("*")) if path.is_file())


def _copy_file(source: Path, target: Path) -> None:
    """Copy a file with its mode and flush it to disk."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)
    with target.open("rb+") as file:
        os.fsync(file.fileno())
    sync_folder(target.parent)


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` to be filled; removed at the end if it is still there."""
    out.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _put(made: Path, out: Path) -> None:
    """Let the complete folder `made` take the place of `out`."""
    if out.exists():
        old = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.old."))
        os.replace(out, old / "was")
        os.replace(made, out)
        shutil.rmtree(old)
    else:
        os.replace(made, out)
    sync_folder(out.parent)
