"""The lock that one process holds on a state folder."""

import fcntl
import os
from pathlib import Path

from profiles.errors import InputError


class FolderLock:
    """A lock on `folder` until `release`, or until the process ends.

    Raises InputError if another process holds it.
    """

    def __init__(self, folder: Path) -> None:
        self._handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._handle)
            raise InputError(
                f"{folder} is in use: stop the coordinator that runs on it first.",
                code="state.in-use",
                path=str(folder),
            ) from None

    def release(self) -> None:
        """Let other processes use the folder."""
        os.close(self._handle)
