"""Upgrades databases of earlier versions to the current one, in one transaction."""

import sqlite3
from collections.abc import Iterator

import msgspec

from device_agent.formats.manifest import encode
from device_agent.formats.update import UpdateRecord
from toolkit.coordinator.storage import content_digest, schema

READABLE = (5, schema.SCHEMA_VERSION)
"""The versions that this program reads. `edgetailor serve` upgrades them to the current one."""


def upgrade(db: sqlite3.Connection) -> None:
    """Upgrade the tables of `db` to the current version. A kill leaves the earlier version."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version == schema.SCHEMA_VERSION:
        return
    db.execute("BEGIN IMMEDIATE")
    _count_updates_in_columns(db)
    db.execute(f"PRAGMA user_version={schema.SCHEMA_VERSION}")


def _count_updates_in_columns(db: sqlite3.Connection) -> None:
    """Upgrade from version 5 to 6: the counted values of an update get columns."""
    for event in ("insert", "delete", "update"):
        db.execute(f"DROP TRIGGER updates_{event}")
    db.execute("DROP INDEX updates_by_file")
    db.execute("ALTER TABLE updates RENAME TO earlier_updates")
    db.execute(schema.UPDATES)
    db.executemany("INSERT INTO updates VALUES (?, ?, ?, ?, ?, ?, ?, ?)", _counted(db))
    db.execute("DROP TABLE earlier_updates")
    db.execute("CREATE INDEX updates_by_file ON updates (sha256)")
    for trigger in content_digest.triggers(db, "updates"):
        db.execute(trigger)
    content_digest.renew(db)


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
