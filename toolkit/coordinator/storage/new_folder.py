"""Creates a folder with all of its content at once, for backups and restored state folders."""

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from device_agent.formats.atomic_files import sync_folder
from profiles.errors import InputError

OF_FILE_SYSTEMS = {"lost+found"}
"""The names that a new file system contains."""


@contextmanager
def new_folder(out: Path, last: str) -> Iterator[Path]:
    """Yield a temporary folder to fill. At the end of the block `out` gets its content.

    After an error `out` is unchanged. An `out` that is not empty is replaced by a rename. An empty
    `out` stays and is filled, because it may be a mounted volume. The file called `last` is written
    last: a folder without this file is incomplete.
    """
    out = out.resolve()
    filled = out.is_dir() and is_empty(out)
    parent = out if filled else out.parent
    parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=parent, prefix=f".{out.name}."))
    try:
        with _in_use(temporary):
            yield temporary
            if filled:
                _move_content(temporary, out, last)
            else:
                _replace(temporary, out)
        _remove_leftovers(parent, out.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def is_empty(folder: Path) -> bool:
    """Whether nobody has written to `folder`."""
    return all(path.name in OF_FILE_SYSTEMS for path in folder.iterdir())


def copy_file(source: Path, target: Path) -> None:
    """Copy a file with its mode and flush it to disk."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copy(source, target)
        with target.open("rb+") as file:
            os.fsync(file.fileno())
        sync_folder(target.parent)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.filename2 is not None:  # shutil names the source, but the target's disk failed
            error.filename = error.filename2
        raise


def check_apart(state: Path, out: Path) -> None:
    """Raise InputError if `out` is the folder `state`, is in it or contains it."""
    state_path, out_path = state.resolve(), out.resolve()
    if state_path.is_relative_to(out_path) or out_path.is_relative_to(state_path):
        raise InputError(
            "{path} and the state folder {state} are the same, or one is inside the other: give a "
            "path outside of the state folder. Nothing was changed.",
            code="file.in-state-folder",
            path=str(out),
            state=str(state),
        )


@contextmanager
def _in_use(folder: Path) -> Iterator[None]:
    """Lock `folder` itself during the block. Raises BlockingIOError if it is locked already."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _remove_leftovers(parent: Path, name: str) -> None:
    """Remove the hidden folders that remain if a process was killed while it created `name`."""
    hidden = re.compile(rf"\.{re.escape(name)}\.(old\.)?[a-z0-9_]{{8}}")
    for path in parent.iterdir():
        if hidden.fullmatch(path.name) and path.is_dir():
            with suppress(OSError), _in_use(path):
                shutil.rmtree(path)


def _move_content(temporary: Path, out: Path, last: str) -> None:
    paths = sorted(temporary.iterdir(), key=lambda path: (path.name == last, path.name))
    for path in paths:
        if path.name == last:
            sync_folder(out)
        os.replace(path, out / path.name)
    sync_folder(out)


def _replace(temporary: Path, out: Path) -> None:
    """Replace `out` by the complete folder `temporary`."""
    if out.exists():
        old = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.old."))
        os.replace(out, old / "was")
        os.replace(temporary, out)
        shutil.rmtree(old)
    else:
        os.replace(temporary, out)
    sync_folder(out.parent)
