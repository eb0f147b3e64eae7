"""The changes of the federation's file that wait for the next round or are in effect."""

import json
import sqlite3
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from toolkit.coordinator.database.database import Database

MODEL, TENSORS = "model", "model.tensors"
"""The key of the model, and the key of a `Change` that says what is carried over into a new
model."""
LOSS = "loss"
"""The key in the table `meta` of the description of the user's own loss."""
FEDERATION = "federation"
"""The key in the table `meta` of the settings that are checked at every start."""
_SCHEDULED = "scheduled settings"
"""The key in the table `meta` of the changes that wait for a round."""


@dataclass(frozen=True)
class Change:
    """A key of the federation's file with its values before and after, as JSON.

    `before` is "null" for a key that was not set.
    """

    key: str
    before: str
    after: str

    def text(self) -> str:
        """The change in one line. A change with the key TENSORS has no value before.

        Examples:
            >>> Change("training.learning_rate", "0.05", "0.01").text()
            'training.learning_rate: 0.05 -> 0.01'
        """
        if self.key == TENSORS:
            return f"{self.key}: {json.loads(self.after)}"
        return f"{self.key}: {self.before} -> {self.after}"


class SettingsLog:
    """Stores the changes of a federation's settings."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def schedule(self, db: sqlite3.Connection, changes: Iterable[Change]) -> None:
        """Schedule `changes` for the next round in the transaction `db`; drop earlier changes."""
        text = json.dumps([asdict(change) for change in changes])
        db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (_SCHEDULED, text))

    def scheduled(self) -> list[Change]:
        """The changes that wait for the next round."""
        with self._database.transaction() as db:
            row = db.execute("SELECT value FROM meta WHERE key = ?", (_SCHEDULED,)).fetchone()
        return [] if row is None else [Change(**change) for change in json.loads(row[0])]

    def take_effect(
        self, db: sqlite3.Connection, round_: int, changes: Iterable[Change], checked: str
    ) -> None:
        """Record that `changes` are in effect from `round_` on, in the transaction `db`.

        `checked` are the new settings that are checked at every start. After this, no change waits.
        """
        db.executemany(
            "INSERT INTO settings_changes VALUES (?, ?, ?, ?) ON CONFLICT (round, key) DO UPDATE "
            "SET after = excluded.after",
            [(round_, change.key, change.before, change.after) for change in changes],
        )
        db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (FEDERATION, checked))
        db.execute("DELETE FROM meta WHERE key = ?", (_SCHEDULED,))

    def model_changed_after(self, round_: int) -> bool:
        """Whether the model after `round_` is older than a change of `model`."""
        with self._database.transaction() as db:
            row = db.execute(
                "SELECT 1 FROM settings_changes WHERE key = ? AND round > ?", (MODEL, round_)
            ).fetchone()
        return row is not None

    def by_round(self) -> dict[int, list[str]]:
        """The texts of changes, by the round that began with them."""
        with self._database.transaction() as db:
            return changes_by_round(db)


def changes_model(changes: Iterable[Change]) -> bool:
    """Whether one of `changes` is a new `model`."""
    return any(change.key == MODEL for change in changes)


def changes_by_round(db: sqlite3.Connection) -> dict[int, list[str]]:
    """The texts of changes, by the round that began with them."""
    texts: dict[int, list[str]] = {}
    rows = db.execute("SELECT round, key, before, after FROM settings_changes ORDER BY rowid")
    for round_, *change in rows:
        texts.setdefault(round_, []).append(Change(*change).text())
    return texts
