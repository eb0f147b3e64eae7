"""The coordinator's database: one sqlite3 file, one writer behind a lock."""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from profiles.errors import InputError, StorageError

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS tokens (
    kind TEXT PRIMARY KEY, hash TEXT NOT NULL, count INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS devices (
    id TEXT PRIMARY KEY, kind TEXT NOT NULL, name TEXT NOT NULL, secret TEXT NOT NULL,
    bytes_down INTEGER NOT NULL DEFAULT 0, bytes_up INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS bundles (
    round INTEGER, submodel TEXT, name TEXT, size INTEGER NOT NULL, sha256 TEXT NOT NULL,
    PRIMARY KEY (round, submodel, name));
CREATE TABLE IF NOT EXISTS uploads (device TEXT PRIMARY KEY, sha256 TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS updates (
    round INTEGER, device TEXT, sha256 TEXT NOT NULL, record BLOB NOT NULL,
    PRIMARY KEY (round, device));
CREATE TABLE IF NOT EXISTS history (
    round INTEGER PRIMARY KEY, accuracy REAL, loss REAL NOT NULL,
    updates INTEGER NOT NULL, model TEXT NOT NULL);
"""

ADDED = {
    "tokens": {"made": "REAL", "days": "REAL"},
    "devices": {
        "public_key": "TEXT",
        "machine": "TEXT",
        "has_left": "INTEGER NOT NULL DEFAULT 0",
        "fallback_from": "INTEGER",
        "trouble": "TEXT",
        "submodel": "TEXT",
    },
}
"""Columns that came after the first version: every database gets those that it lacks.

`made` is in seconds since 1970, `machine` JSON, `fallback_from` a round.
"""


class Database:
    """The file at `path`: WAL, synchronous=FULL, open in this process only.

    Raises InputError where another process has it open, or where it is something else.
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

    def _prepare(self) -> None:
        # Exclusive: a second `serve` on this folder fails here rather than later and oddly.
        self._connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=FULL")
        (found,) = self._connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(" ".join(found.split()))
        self._connection.executescript(SCHEMA)
        self._add_columns()

    def _add_columns(self) -> None:
        """Give the tables what they lack of ADDED."""
        for table, columns in ADDED.items():
            there = {row[1] for row in self._connection.execute(f"PRAGMA table_info({table})")}
            for name in columns.keys() - there:
                self._connection.execute(f"ALTER TABLE {table} ADD COLUMN {name} {columns[name]}")

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """The connection, alone; what is done to it is kept whole, or not at all on an error.

        Raises StorageError where the disk refuses.
        """
        try:
            with self._lock, self._connection:
                yield self._connection
        except sqlite3.OperationalError as error:
            raise StorageError(
                f"{self._path} cannot be written ({error}): make room on its disk, and start "
                "`edgetailor serve` again if it has ended. Nothing that was taken is lost."
            ) from None

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Keep other threads off the database, and off the files that go with it."""
        with self._lock:
            yield

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._connection.close()


def _unusable(path: Path, error: sqlite3.DatabaseError) -> InputError:
    if isinstance(error, sqlite3.OperationalError):
        return InputError(
            f"{path.parent} cannot be used ({error}): stop the coordinator that runs on it, or set "
            "another `state` folder."
        )
    return InputError(
        f"{path.parent} is not a state folder of this program ({error}): set another `state`, or "
        f"put a copy of {path.name} back."
    )
