"""A full disk: writes wait until there is room."""

import errno
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from profiles.errors import StorageError
from toolkit.coordinator.storage.coordinator_store import Store

logger = logging.getLogger(__name__)

ROOM_S = 5.0
"""How often a write to a full disk is tried again, in seconds."""


def when_room(write: Callable[[], None], store: Store, stopping: threading.Event) -> None:
    """Run `write`. If the disk is full, log this once and repeat `write` until there is room.

    Before each repetition, it removes the files that the database of `store` no longer names. If
    `stopping` is set, the error is raised.
    """
    told = False
    while True:
        try:
            write()
            return
        except OSError as error:
            if not _is_full(error) or stopping.is_set():
                raise
            if not told:
                logger.warning(
                    "The disk with %s is full: the rounds wait until there is room. No update "
                    "is lost.",
                    store.folder,
                )
            told = True
        store.remove_unnamed()
        stopping.wait(ROOM_S)


def _is_full(error: Exception) -> bool:
    """Whether `error` says that a disk is full."""
    return isinstance(error, OSError) and error.errno == errno.ENOSPC


def plain(error: Exception, folder: Path) -> Exception:
    """Return `error` as the operator reads it: for a full disk, with the remedy."""
    if not _is_full(error):
        return error
    return StorageError(
        "The disk with {path} is full, so the rounds cannot go on. Make room on it, and start "
        "`edgetailor serve` again. No update is lost.",
        code="storage.disk-full",
        path=str(folder),
    )
