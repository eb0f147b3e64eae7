"""The coordinator's database: one sqlite3 file, one writer behind a lock."""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from profiles.errors import InputError, StorageError

SCHEMA_VERSION = 1
"""Kept in the file as `PRAGMA user_version`. Raise it with every change of SCHEMA."""
SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE tokens (
    kind TEXT PRIMARY KEY, hash TEXT NOT NULL, count INTEGER NOT NULL,
    made REAL NOT NULL,  -- seconds since 1970
    days REAL NOT NULL);
CREATE TABLE devices (
    id TEXT PRIMARY KEY, kind TEXT NOT NULL, name TEXT NOT NULL, secret TEXT NOT NULL,
    public_key TEXT NOT NULL,
    machine TEXT NOT NULL,  -- JSON
    submodel TEXT,  -- NULL if the kind of device names it
    has_left INTEGER NOT NULL DEFAULT 0,
    fallback_from INTEGER,  -- the first round with the kind's fallback
    trouble TEXT,
    bytes_down INTEGER NOT NULL DEFAULT 0, bytes_up INTEGER NOT NULL DEFAULT 0);
CREATE TABLE bundles (
    round INTEGER, submodel TEXT, name TEXT, size INTEGER NOT NULL, sha256 TEXT NOT NULL,
    PRIMARY KEY (round, submodel, name));
CREATE TABLE uploads (device TEXT PRIMARY KEY, sha256 TEXT NOT NULL);
CREATE TABLE updates (
    round INTEGER, device TEXT, sha256 TEXT NOT NULL, record BLOB NOT NULL,
    PRIMARY KEY (round, device));
CREATE TABLE history (
    round INTEGER PRIMARY KEY, accuracy REAL, loss REAL NOT NULL,
    updates INTEGER NOT NULL, model TEXT NOT NULL,
    left_out TEXT NOT NULL);  -- JSON: why an update was not used, by device
"""


class Database:
    """The file at `path`: WAL, synchronous=FULL, open in this process only.

    Raises InputError if another process has it open, or if it is not a database of SCHEMA_VERSION.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.RLock()
        try:
            self._connection = sqlite3.connect(path, timeout=1, check_same_thread=False)
        except sqlite3.OperationalError as error:
            raise _unusable(path, error) from None
        try:
            self._prepare()
        except sqlite3.DatabaseError as error:
            self._connection.close()
            raise _unusable(path, error) from None
        except InputError:
            self._connection.close()
            raise

    def _prepare(self) -> None:
        # Exclusive: a second `serve` on this folder fails here, before it changes anything.
        self._connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        self._check_version()
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=FULL")
        (found,) = self._connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(" ".join(found.split()))
        if self._is_new():
            # One transaction: a process that is killed here leaves a new file or a whole schema.
            self._connection.executescript(
                f"BEGIN; {SCHEMA} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;"
            )

    def _is_new(self) -> bool:
        (tables,) = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        return not tables

    def _check_version(self) -> None:
        """Raise InputError if the file was written with another schema."""
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version == SCHEMA_VERSION or self._is_new():
            return
        folder = self._path.parent
        raise InputError(
            f"{folder} was written by another version of edgetailor: its state has version "
            f"{version}, this program reads {SCHEMA_VERSION}. Serve it with the version that wrote "
            "it, or set another `state` folder.",
            code="state.other-version",
            version=version,
            supported=SCHEMA_VERSION,
        )

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """The connection, for this thread only. On an error nothing of the transaction is kept.

        Raises StorageError if the disk is full or fails.
        """
        try:
            with self._lock, self._connection:
                yield self._connection
        except sqlite3.OperationalError as error:
            raise StorageError(
                f"{self._path} cannot be written ({error}). Make room on its disk, and start "
                "`edgetailor serve` again if it has ended. No update is lost.",
                code="storage.not-writable",
                path=str(self._path),
            ) from None

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Keep other threads from the database and from the files that belong to it."""
        with self._lock:
            yield

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()


def _unusable(path: Path, error: sqlite3.DatabaseError) -> InputError:
    if isinstance(error, sqlite3.OperationalError):
        return InputError(
            f"{path.parent} cannot be used ({error}): stop the coordinator that runs on it, or set "
            "another `state` folder.",
            code="state.in-use",
            path=str(path.parent),
        )
    return InputError(
        f"{path.parent} is not a state folder of this program ({error}): set another `state`, or "
        f"put a copy of {path.name} back.",
        code="state.damaged",
        path=str(path.parent),
    )
