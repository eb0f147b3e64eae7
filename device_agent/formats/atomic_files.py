"""Writes files atomically: a reader sees the complete file or no file. Also hashes files."""

import ctypes
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from device_agent.formats.manifest import FileEntry
from profiles.errors import InputError


def fingerprint(data: bytes) -> FileEntry:
    """Size and SHA-256 of `data`."""
    return FileEntry(size=len(data), sha256=hashlib.sha256(data).hexdigest())


def fingerprint_file(path: Path) -> FileEntry:
    """Size and SHA-256 of the file at `path`, read in pieces to save memory."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return FileEntry(size=path.stat().st_size, sha256=digest.hexdigest())


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add `path` to each OSError that the block raises, because some errors name no file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_file(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace `path` with `data` atomically: write a temporary file, flush it, rename it."""
    stream_file(path, lambda file: file.write(data), mode)


def stream_file(path: Path, write: Callable[[BinaryIO], object], mode: int = 0o644) -> None:
    """Replace `path` atomically, like `write_file`. `write` writes the content to an open file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The temporary file is in the same folder: a rename is atomic within one file system only.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with naming(path), os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fchmod(file.fileno(), mode)
            # Without this, a power cut after the rename could leave an empty file.
            os.fsync(file.fileno())
        os.replace(name, path)
        sync_folder(path.parent)
    except BaseException:  # also on an interrupt, so that no temporary files remain
        Path(name).unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Flush renames in `folder` to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with naming(folder):
            os.fsync(handle)
    finally:
        os.close(handle)


def shown(path: Path) -> Path:
    """Make `path` relative if it is inside the current folder. Otherwise return it unchanged."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def refuse_existing(out: Path, force: bool = False) -> None:
    """Raise InputError if `out` exists, unless `force` allows replacing it."""
    if os.path.lexists(out) and not force:
        raise InputError(
            "{out} exists already: give another place, or --force to replace it.",
            code="file.exists",
            path=str(out),
            out=out,
        )


def check_file_place(out: Path, force: bool = False) -> None:
    """Raise InputError if `write_file` cannot write `out`, or may not replace it.

    Commands call this before they start long work, so that a wrong path is reported at once.
    """
    if out.is_dir():
        raise InputError(
            "{out} is a folder: give the name of a file.",
            code="file.is-folder",
            path=str(out),
            out=out,
        )
    nearest = next((parent for parent in out.parents if parent.exists()), None)
    if nearest is not None and not nearest.is_dir():
        raise InputError(
            "{out} cannot be written: {path} is a file, not a folder.",
            code="file.not-a-folder",
            path=str(nearest),
            out=out,
        )
    if nearest is not None and not os.access(nearest, os.W_OK | os.X_OK):
        raise InputError(
            "{out} cannot be written: {path} is read-only. Give another place.",
            code="file.read-only",
            path=str(nearest),
            out=out,
        )
    if out.exists() and not out.is_file():
        raise InputError(
            "{out} is not a regular file: give another place.",
            code="file.not-regular",
            path=str(out),
            out=out,
        )
    refuse_existing(out, force)
    if nearest is not None:
        # In folders such as /proc, or with a long name, writing fails although the mode allows it.
        longest = max(out.relative_to(nearest).parts, key=len)
        try:
            handle, name = tempfile.mkstemp(dir=nearest, prefix=f".{longest}.")
        except OSError as error:
            raise InputError(
                "{out} cannot be written: {reason}. Give another place.",
                code="file.refused",
                path=str(out),
                out=out,
                reason=error.strerror,
            ) from None
        os.close(handle)
        os.unlink(name)


def write_folder(
    out: Path, files: Mapping[str, bytes], force: bool = False, staging: Path | None = None
) -> None:
    """Create the folder `out` with `files` (a mapping from names to contents) atomically.

    If `out` exists, it is refused, unless `force` is set. With `force`, the new folder replaces
    `out` when it is complete, on Linux in one step. Incomplete files are in `staging`, a folder on
    the same file system. By default, `staging` is the parent of `out`.
    """
    refuse_existing(out, force)
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = staging or out.parent
    staged = Path(tempfile.mkdtemp(dir=staging, prefix=f".{out.name}."))
    try:
        for name, data in files.items():
            write_file(staged / name, data)
        staged.chmod(0o755)  # mkdtemp creates folders that only the user can read
        if not out.exists():
            os.replace(staged, out)
        elif not exchange(staged, out):
            # A folder that is not empty cannot be replaced by a rename, so move the old one away.
            old = Path(tempfile.mkdtemp(dir=staging, prefix=f".{out.name}.old."))
            os.replace(out, old / "was")
            # If the process is killed here, there is no `out`, but `staging` has both folders.
            os.replace(staged, out)
            shutil.rmtree(old)
        sync_folder(out.parent)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def exchange(first: Path, second: Path) -> bool:
    """Exchange two folders of one file system atomically.

    Returns False if the system does not support this. Linux supports it with most file systems.
    """
    try:
        rename = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError, TypeError):
        return False
    here, exchanged = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    source, target = (ctypes.c_char_p(os.fsencode(path)) for path in (first, second))
    return bool(rename(here, source, here, target, exchanged) == 0)
