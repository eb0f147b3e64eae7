"""The coordinator's database: one sqlite3 file, one writer behind a lock."""

import errno
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from profiles.errors import StorageError
from toolkit.coordinator.database import content_digest, schema, schema_upgrade

BUSY_S = 60.0
"""How long a transaction waits for a reader in another process, such as a backup."""

Also = Callable[[sqlite3.Connection], None]
"""Writes something else in the same transaction."""


def raise_if_full(error: sqlite3.OperationalError, path: Path) -> None:
    """Raise the OSError of a full disk if the disk with the database `path` is full."""
    if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from None


class Database:
    """The file at `path`, which has passed `check_database`. It is created if it does not exist.

    The database uses a rollback journal instead of a write-ahead log. After a commit, everything is
    in this file, and no other file can be lost. `on_milestone` is called after the commit of each
    `milestone`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.RLock()
        self._connection = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
        self.on_milestone: Callable[[sqlite3.Connection], None] = lambda connection: None
        content_digest.install(self._connection)
        self._connection.execute("PRAGMA journal_mode=TRUNCATE")
        # With TRUNCATE, FULL also flushes the end of the journal: a power cut undoes no commit.
        self._connection.execute("PRAGMA synchronous=FULL")
        (tables,) = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if tables:
            with self.transaction() as db:
                schema_upgrade.upgrade(db)
        else:
            schema.create(self._connection)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """The connection, for this thread only. An error undoes the whole transaction.

        Raises OSError if the disk is full, and StorageError if the file cannot be written.
        """
        try:
            with self._lock, self._connection:
                yield self._connection
        except sqlite3.OperationalError as error:
            raise_if_full(error, self._path)
            raise StorageError(
                "{path} cannot be written: {reason}. Check the disk and the permissions of the "
                "state folder. Nothing was changed.",
                code="storage.not-writable",
                path=str(self._path),
                reason=str(error),
            ) from None

    @contextmanager
    def milestone(self) -> Iterator[sqlite3.Connection]:
        """A transaction that is counted. The count shows whether a database is an older copy."""
        with self._lock:
            with self.transaction() as db:
                db.execute("UPDATE meta SET value = value + 1 WHERE key = 'generation'")
                yield db
            self.on_milestone(self._connection)

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Keep other threads from the database and from the files that belong to it."""
        with self._lock:
            yield

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()
