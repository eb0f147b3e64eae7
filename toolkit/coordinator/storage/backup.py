"""Makes a consistent copy of a state folder, also while `serve` runs, and restores it."""

import errno
import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from device_agent.formats.atomic_files import fingerprint_file, refuse_existing, write_file
from profiles.errors import InputError, StorageError
from toolkit.coordinator.database.database import raise_if_full
from toolkit.coordinator.database.key_log import KEY, KNOWN_KEY, NEXT_KEY
from toolkit.coordinator.storage.coordinator_store import REFERENCED
from toolkit.coordinator.storage.federation_marker import Marker
from toolkit.coordinator.storage.folder_check import CONTENTS, DATABASE, check_folder
from toolkit.coordinator.storage.folder_lock import FolderLock
from toolkit.coordinator.storage.new_folder import check_apart, copy_file, is_empty, new_folder
from toolkit.coordinator.storage.recoverable import FILES, HISTORY, MODEL, has_hash
from toolkit.coordinator.storage.release_folder import INDEX, RELEASES, ReleaseFolder, bundles_kept
from toolkit.coordinator.storage.saved_rounds import reading

TOKENS = ("operator.token", "tokens", NEXT_KEY, KEY)
"""Secrets of the federation. Without the coordinator's key, every device would have to join again.
The next key is copied before the key, so that one of them fits the database."""
_KNOWN_KEY = f"SELECT value FROM meta WHERE key = '{KNOWN_KEY}'"
ATTEMPTS = 10
"""How often a backup is tried. An attempt fails if a round ends, or the key is replaced, while the
files are copied."""


def backup(state: Path, out: Path, force: bool = False) -> None:
    """Copy the federation in `state` to the new folder `out` and check the copy.

    Raises:
        InputError: `state` contains no federation; a file in it is missing or damaged; `out` exists
            and `force` is not set; or `out` contains something other than a backup.
    """
    with reading(state):  # raises if it is not a federation
        pass
    check_apart(state, out)
    if out.exists() and not (out.is_dir() and is_empty(out)):
        _check_replaceable(out)
    refuse_existing(out, force)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with _told(out), new_folder(out, CONTENTS) as temporary:
                _copy(state, temporary)
                check_folder(temporary)
                _write_contents(temporary)
                _check_contents(temporary)
            return
        except FileNotFoundError:  # the end of a round has removed a file, or the key was replaced
            if attempt == ATTEMPTS:
                raise


def restore(copy: Path, state: Path) -> None:
    """Create the state folder `state` from the backup `copy`.

    Raises:
        InputError: If `copy` is not a complete backup, or if `state` is in use or not empty.
    """
    _contents(copy)
    check_apart(copy, state)
    with ExitStack() as stack:
        if state.exists():
            if not state.is_dir() or not is_empty(state):
                raise InputError(
                    "{path} is not an empty folder: give another path, or move it away first. "
                    "Nothing was changed.",
                    code="backup.state-not-empty",
                    path=str(state),
                )
            stack.callback(FolderLock(state).release)
        _check_contents(copy)
        with reading(copy):  # raises if the database has another version
            pass
        with _told(state), new_folder(state, DATABASE) as temporary:
            for name in _contents(copy):
                copy_file(copy / name, temporary / name)
            check_folder(temporary)


@contextmanager
def _told(out: Path) -> Iterator[None]:
    """In an error of the disk, name `out` instead of the hidden temporary folder."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        remedy = "Make room on its disk" if error.errno == errno.ENOSPC else "Give another path"
        raise StorageError(
            "{path} cannot be written: {reason}. {remedy}. Nothing was changed.",
            code="backup.not-writable",
            path=str(out),
            errno=errno.errorcode.get(error.errno or 0),
            reason=error.strerror,
            remedy=remedy,
        ) from error


def _check_replaceable(out: Path) -> None:
    """Raise InputError if `out` is not a backup, or holds other files too."""
    known = {CONTENTS, *_contents(out)} if (out / CONTENTS).is_file() else set()
    if not known or any(str(path.relative_to(out)) not in known for path in _files(out)):
        raise InputError(
            "--force replaces a folder only if it has a backup and nothing else, unlike {path}. "
            "Give another path. Nothing was changed.",
            code="backup.replaces-other",
            path=str(out),
        )


def _copy(state: Path, temporary: Path) -> None:
    """Copy a snapshot of the database, then the files that it names."""
    with reading(state) as source, closing(sqlite3.connect(temporary / DATABASE)) as target:
        try:
            source.backup(target)
        except sqlite3.OperationalError as error:
            raise_if_full(error, temporary / DATABASE)
            raise
        files = [name for (name,) in target.execute(REFERENCED)]
        key = target.execute(_KNOWN_KEY).fetchone()
        marker = Marker.of(target)
    os.chmod(temporary / DATABASE, 0o600)
    for sha256 in files:
        _copy_blob(state, temporary, sha256)
    marker.write(temporary)
    if marker.model is not None:
        copy_file(temporary / FILES / marker.model, temporary / MODEL)
    for name in TOKENS:
        for path in _files(state / name):
            copy_file(path, temporary / path.relative_to(state))
    with reading(state) as source:
        if source.execute(_KNOWN_KEY).fetchone() != key:
            raise FileNotFoundError(KEY)  # the key was replaced meanwhile: the backup begins again
    if (state / HISTORY).exists():
        copy_file(state / HISTORY, temporary / HISTORY)
    _copy_releases(state, temporary)


def _copy_releases(state: Path, temporary: Path) -> None:
    """Copy the releases, then the bundles that they name. Raises InputError for a damaged file."""
    if not (state / RELEASES / INDEX).exists():
        return
    copy_file(state / RELEASES / INDEX, temporary / RELEASES / INDEX)
    folder, source = ReleaseFolder(temporary), ReleaseFolder(state)
    releases = folder.read()
    known = {release.number: release for release in releases}
    for number, kind in bundles_kept(releases):
        release = known[number]
        files = {
            source.bundle(number, kind) / name: (folder.bundle(number, kind) / name, entry)
            for name, entry in release.kinds[kind].items()
        } | {
            source.training(number, kind) / name: (folder.training(number, kind) / name, entry)
            for name, entry in release.training.get(kind, {}).items()
        }
        for path, (target, entry) in files.items():
            if path.exists() or (number, kind) not in bundles_kept(source.read()):
                copy_file(path, target)  # if a new release has removed it, the backup begins again
            if not has_hash(target, entry.sha256):
                raise InputError(
                    "{path} is missing or damaged, so no backup can be made. Withdraw release "
                    "{number} (`edgetailor release FEDERATION --back`), or put a copy back.",
                    code="backup.damaged-release",
                    path=str(path),
                    number=number,
                )


def _copy_blob(state: Path, temporary: Path, sha256: str) -> None:
    """Copy one of the files that the database names.

    Raises InputError for a damaged or lost file.
    """
    source, target = state / FILES / sha256, temporary / FILES / sha256
    try:
        copy_file(source, target)
    except FileNotFoundError:
        with reading(state) as db:
            if (sha256,) not in db.execute(REFERENCED).fetchall():
                raise
    if not has_hash(target, sha256):
        raise InputError(
            "{path} is missing or damaged, so no backup can be made. Restart `edgetailor serve` "
            "with --check-models, which says what can be recovered.",
            code="backup.damaged-file",
            path=str(source),
        )


def _write_contents(temporary: Path) -> None:
    files = {
        str(path.relative_to(temporary)): fingerprint_file(path).sha256
        for path in _files(temporary)
    }
    document = {"version": 1, "files": files}
    write_file(temporary / CONTENTS, json.dumps(document, indent=1).encode() + b"\n")


def _contents(copy: Path) -> dict[str, str]:
    """The files of the backup `copy` with their SHA-256.

    Raises InputError if `copy` is not a backup.
    """
    try:
        document = json.loads((copy / CONTENTS).read_bytes())
        files = {str(name): str(sha256) for name, sha256 in document["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise InputError(
            "{path} is not a backup: it has no readable {contents}. Give a folder that "
            "`edgetailor backup` made.",
            code="backup.not-a-backup",
            path=str(copy),
            contents=CONTENTS,
        ) from None
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in files):
        raise InputError(
            "{contents} names files outside of its folder. Give another backup.",
            code="backup.unsafe-name",
            path=str(copy),
            contents=copy / CONTENTS,
        )
    return files


def _check_contents(copy: Path) -> None:
    """Raise InputError if a file of the backup is missing or damaged."""
    for name, sha256 in _contents(copy).items():
        if not has_hash(copy / name, sha256):
            raise InputError(
                "{path} is missing or damaged: this backup cannot be restored. "
                "Give another backup. Nothing was changed.",
                code="backup.damaged-file",
                path=str(copy / name),
            )


def _files(root: Path) -> Iterator[Path]:
    if root.is_file():
        yield root
    elif root.is_dir():
        yield from (path for path in sorted(root.rglob("*")) if path.is_file())
