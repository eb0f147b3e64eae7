"""Stores who judges the model of the last round, and their answers, for a restart."""

import sqlite3

import msgspec

from device_agent.formats.evaluation_counts import EvaluationCounts
from toolkit.coordinator.database.database import Database

_PREFIX = "judge:"
"""The prefix of a device's id in the keys of the table `meta`."""
_NONE = ""
"""The value of a device that has not answered."""


class FinalEvaluation:
    """Stores the devices that are asked to judge the model of the last round."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(self, devices: list[str]) -> None:
        """Ask `devices`. These replace the devices that were asked before."""
        with self._database.transaction() as db:
            forget(db)
            rows = [(_PREFIX + device, _NONE) for device in devices]
            db.executemany("INSERT INTO meta VALUES (?, ?)", rows)

    def answer(self, device: str, counts: EvaluationCounts) -> None:
        """Store the answer of `device`, unless it has answered or was not asked."""
        with self._database.transaction() as db:
            db.execute(
                "UPDATE meta SET value = ? WHERE key = ? AND value = ?",
                (msgspec.json.encode(counts).decode(), _PREFIX + device, _NONE),
            )

    def is_asked(self, device: str) -> bool:
        """Whether `device` is asked, or was asked and has answered."""
        with self._database.transaction() as db:
            row = db.execute("SELECT 1 FROM meta WHERE key = ?", (_PREFIX + device,)).fetchone()
        return row is not None

    def answers(self) -> dict[str, EvaluationCounts | None]:
        """The counts of each asked device; None for a device that has not answered."""
        with self._database.transaction() as db:
            rows = db.execute(
                "SELECT key, value FROM meta WHERE key LIKE ? ORDER BY key", (f"{_PREFIX}%",)
            ).fetchall()
        return {
            key.removeprefix(_PREFIX): None
            if value == _NONE
            else msgspec.json.decode(value, type=EvaluationCounts)
            for key, value in rows
        }


def forget(db: sqlite3.Connection) -> None:
    """Forget who was asked, in the transaction of `db`."""
    db.execute("DELETE FROM meta WHERE key LIKE ?", (f"{_PREFIX}%",))
