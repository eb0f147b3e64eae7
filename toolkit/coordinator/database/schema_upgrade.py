"""Upgrades databases of earlier versions to the current one, in one transaction."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from device_agent.formats.manifest import encode
from device_agent.formats.update import UpdateRecord
from toolkit.coordinator.database import content_digest, schema

READABLE = (5, 6, 7, 8, 9, 10, 11, 12, schema.SCHEMA_VERSION)
"""The versions that this program reads. `edgetailor serve` upgrades them to the current one."""


def upgrade(db: sqlite3.Connection) -> None:
    """Upgrade the tables of `db` to the current version. A kill leaves the earlier version."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version == schema.SCHEMA_VERSION:
        return
    db.execute("BEGIN IMMEDIATE")
    if version < 6:
        _count_updates_in_columns(db)
    _extend_history(db)
    _add_tables(db, version)
    content_digest.renew(db)
    db.execute(f"PRAGMA user_version={schema.SCHEMA_VERSION}")


def _count_updates_in_columns(db: sqlite3.Connection) -> None:
    """Upgrade from version 5 to 6: the counted values of an update get columns."""
    with _replaced(db, "updates", schema.UPDATES):
        db.executemany("INSERT INTO updates VALUES (?, ?, ?, ?, ?, ?, ?, ?)", _counted(db))
    db.execute("CREATE INDEX updates_by_file ON updates (sha256)")


def _extend_history(db: sqlite3.Connection) -> None:
    """Add the columns of `history` that an earlier version did not have; they are empty."""
    (columns,) = db.execute("SELECT count(*) FROM pragma_table_info('history')").fetchone()
    with _replaced(db, "history", schema.HISTORY):
        (all_,) = db.execute("SELECT count(*) FROM pragma_table_info('history')").fetchone()
        new = ", NULL" * (all_ - columns)
        db.execute(f"INSERT INTO history SELECT *{new} FROM earlier_history")
    db.execute("CREATE INDEX history_by_file ON history (model)")


def _add_tables(db: sqlite3.Connection, version: int) -> None:
    """Add the tables of the versions after `version`."""
    for since in (since for since in schema.ADDED if since > version):
        for statement in schema.ADDED[since]:
            db.execute(statement)
        for table in schema.NEW_TABLES[since]:
            for trigger in content_digest.triggers(db, table):
                db.execute(trigger)


@contextmanager
def _replaced(db: sqlite3.Connection, table: str, statement: str) -> Iterator[None]:
    """Create `table` again with `statement`; the block copies the rows of earlier_{table}."""
    for event in ("insert", "delete", "update"):
        db.execute(f"DROP TRIGGER {table}_{event}")
    db.execute(f"DROP INDEX {table}_by_file")
    db.execute(f"ALTER TABLE {table} RENAME TO earlier_{table}")
    db.execute(statement)
    yield
    db.execute(f"DROP TABLE earlier_{table}")
    for trigger in content_digest.triggers(db, table):
        db.execute(trigger)


def _counted(db: sqlite3.Connection) -> Iterator[tuple[str | int | float | bytes, ...]]:
    """Yield the earlier updates with their columns, except updates that are refused today."""
    for round_, device, sha256, data in db.execute(
        "SELECT round, device, sha256, record FROM earlier_updates ORDER BY rowid"
    ):
        try:
            record = msgspec.json.decode(data, type=UpdateRecord)
        except msgspec.MsgspecError:
            continue
        yield (round_, device, sha256, encode(record), *columns(record))


def columns(record: UpdateRecord) -> tuple[int, int, float, float]:
    """The counted values of an update, in the order of the table's columns."""
    return record.samples, record.steps, record.loss_first, record.loss_last
