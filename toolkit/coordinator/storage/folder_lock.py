"""The lock that one process holds on a state folder."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from profiles.errors import InputError


class FolderLock:
    """A lock on `folder` until `release`, or until the process ends.

    Raises InputError if another process holds it.
    """

    def __init__(self, folder: Path) -> None:
        handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise InputError(
                "{path} is in use: first stop the coordinator that uses it.",
                code="state.in-use",
                path=str(folder),
            ) from None
        self._handle: int | None = handle

    def release(self) -> None:
        """Let other processes use the folder."""
        if self._handle is not None:
            os.close(self._handle)
        self._handle = None


def locked(folder: Path) -> FolderLock:
    """Lock the state folder `folder`, which is created if it is missing.

    Raises InputError if the folder cannot be created, or if another process holds the lock.
    """
    try:
        # Only this user may read updates and tokens.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            "The `state` folder {path} cannot be created ({reason}). Set another `state`.",
            code="state.not-a-folder",
            path=str(folder),
            reason=error.strerror,
        ) from None
    return FolderLock(folder)


@contextmanager
def claimed(folder: Path) -> Iterator[FolderLock]:
    """Lock the state folder like `locked`, and yield the lock.

    If the block fails, the lock is released, and a new folder that is empty is removed.
    """
    is_new = not folder.exists()
    lock = locked(folder)
    try:
        yield lock
    except BaseException:
        lock.release()
        if is_new:
            with suppress(OSError):
                folder.rmdir()
        raise
