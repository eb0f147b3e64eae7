"""Stores the deadline of the open round, and the devices that it does not wait for."""

import sqlite3

from toolkit.coordinator.database.database import Database

_MOVED = "moved deadline"
"""The key in the table `meta` of the round whose deadline the operator moved, and the seconds."""
_PREFIX = "stopped:"
"""The prefix of a device's id in the keys of the table `meta`."""


class OpenRound:
    """Stores the open round's deadline, and the devices that reported that they cannot train."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(self, round_: int, closes_at: float) -> float:
        """Store the deadline `closes_at` of `round_` (seconds since 1970), unless one is stored.

        Returns:
            The time at which the round closes, in seconds since 1970.
        """
        with self._database.transaction() as db:
            db.execute("INSERT OR IGNORE INTO openings VALUES (?, ?)", (round_, closes_at))
            row = db.execute("SELECT closes_at FROM openings WHERE round = ?", (round_,))
            return float(row.fetchone()[0])

    def set_deadline(
        self, db: sqlite3.Connection, round_: int, closes_at: float, seconds: float
    ) -> None:
        """Let `round_` end at `closes_at`, `seconds` from now, in the transaction of `db`."""
        db.execute("INSERT OR REPLACE INTO openings VALUES (?, ?)", (round_, closes_at))
        moved = (_MOVED, f"{round_} {seconds}")
        db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", moved)

    def moved_by(self, round_: int) -> float:
        """The seconds in the operator's last order for `round_`; 0 if there was no order."""
        with self._database.transaction() as db:
            row = db.execute("SELECT value FROM meta WHERE key = ?", (_MOVED,)).fetchone()
        moved, _, seconds = "0 0".partition(" ") if row is None else row[0].partition(" ")
        return float(seconds) if int(moved) == round_ else 0.0

    def note_failure(self, round_: int, device: str) -> None:
        """Record that `round_` does not wait for `device`."""
        with self._database.transaction() as db:
            db.execute("INSERT OR IGNORE INTO failures VALUES (?, ?)", (round_, device))

    def failures(self, round_: int) -> list[str]:
        """The devices that `round_` does not wait for."""
        with self._database.transaction() as db:
            rows = db.execute("SELECT device FROM failures WHERE round = ?", (round_,))
            return [device for (device,) in rows]

    def end(self) -> None:
        """Forget the round: it is over, or it opens again from its beginning."""
        with self._database.transaction() as db:
            forget(db)


def forget(db: sqlite3.Connection) -> None:
    """Forget the open round, in the transaction of `db`."""
    db.execute("DELETE FROM openings")
    db.execute("DELETE FROM failures")


class StoppedDevices:
    """Stores which devices have reported that they stop, and why."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def note(self, device: str, reason: str) -> None:
        """Record that `device` has stopped for `reason`."""
        with self._database.transaction() as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (_PREFIX + device, reason))

    def forget(self, device: str) -> None:
        """Forget that `device` has stopped."""
        with self._database.transaction() as db:
            db.execute("DELETE FROM meta WHERE key = ?", (_PREFIX + device,))

    def reasons(self) -> dict[str, str]:
        """Map each device that has stopped to its reason."""
        with self._database.transaction() as db:
            rows = db.execute("SELECT key, value FROM meta WHERE key LIKE ?", (f"{_PREFIX}%",))
            return {key.removeprefix(_PREFIX): reason for key, reason in rows}
