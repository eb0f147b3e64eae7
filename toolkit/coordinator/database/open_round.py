"""Stores the open round: its deadline, whom it asked, and the devices that it does not wait for."""

import sqlite3
from collections.abc import Collection
from typing import NamedTuple

from toolkit.coordinator.database.database import Database

_MOVED = "moved deadline"
"""The key in the table `meta` of the round whose deadline the operator moved, and the seconds."""
_GOAL = "goal"
"""The key in the table `meta` of the last round with selected devices, and its goal of updates."""
_NEEDED = "needed"
"""The key in the table `meta` of that round, and the fewest updates that it may close with."""
_PREFIX = "stopped:"
"""The prefix of a device's id in the keys of the table `meta`."""
_LIMITS = (_GOAL, _NEEDED)


class Selected(NamedTuple):
    """The devices that a round asks, and its limits.

    Attributes:
        devices: The devices.
        goal: The number of updates that closes the round.
        needed: The fewest updates with which the round may close, also after it opened again.
    """

    devices: Collection[str]
    goal: int
    needed: int


class OpenRound:
    """Stores the open round's deadline, the asked devices, and the devices that cannot train."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(self, round_: int, closes_at: float, selected: Selected | None = None) -> float:
        """Store that `round_` opens, with its deadline, unless it is open already.

        Args:
            round_: The round.
            closes_at: The time of the deadline, in seconds since 1970.
            selected: The devices that the round asks; None if it asks all.

        Returns:
            The time at which the round closes, in seconds since 1970.
        """
        with self._database.transaction() as db:
            added = db.execute("INSERT OR IGNORE INTO openings VALUES (?, ?)", (round_, closes_at))
            if added.rowcount and selected is not None:
                _note_selected(db, round_, selected)
            row = db.execute("SELECT closes_at FROM openings WHERE round = ?", (round_,))
            return float(row.fetchone()[0])

    def is_open(self, round_: int) -> bool:
        """Whether `round_` is open: it has begun, and has not ended."""
        with self._database.transaction() as db:
            row = db.execute("SELECT 1 FROM openings WHERE round = ?", (round_,)).fetchone()
        return row is not None

    def selected(self, round_: int) -> Selected | None:
        """The devices that `round_` asked when it opened last; None if it selected none."""
        with self._database.transaction() as db:
            rows = db.execute(
                "SELECT device FROM selected WHERE round = :round AND draw = "
                "(SELECT max(draw) FROM selected WHERE round = :round)",
                {"round": round_},
            ).fetchall()
        limits = self.limits(round_)
        return Selected([device for (device,) in rows], *limits) if rows and limits else None

    def limits(self, round_: int) -> tuple[int, int] | None:
        """The goal of `round_` and the fewest updates that it needs, from its first opening.

        None if the round has not selected devices, or was aborted after it had selected them.
        """
        with self._database.transaction() as db:
            meta = dict(db.execute("SELECT key, value FROM meta WHERE key IN (?, ?)", _LIMITS))
        opened, _, needed = meta.get(_NEEDED, "0 0").partition(" ")
        return (int(meta[_GOAL]), int(needed)) if int(opened) == round_ else None

    def past_selections(self) -> dict[str, tuple[int, int | None]]:
        """By device: the last round that asked it, and the samples of its last update if known."""
        with self._database.transaction() as db:
            rows = db.execute("SELECT device, round, samples FROM selected")
            return {device: (round_, samples) for device, round_, samples in rows}

    def draws(self, round_: int) -> int:
        """How often devices were selected for `round_`."""
        with self._database.transaction() as db:
            row = db.execute("SELECT max(draw) FROM selected WHERE round = ?", (round_,))
            return row.fetchone()[0] or 0

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

    def drop_update(self, db: sqlite3.Connection, round_: int, device: str) -> None:
        """Drop the update of `device` for `round_` in `db`.

        The round does not wait for another update of this device.
        """
        db.execute("DELETE FROM updates WHERE round = ? AND device = ?", (round_, device))
        db.execute("DELETE FROM uploads WHERE device = ?", (device,))
        db.execute("INSERT OR IGNORE INTO failures VALUES (?, ?)", (round_, device))

    def abort(self, db: sqlite3.Connection, round_: int) -> None:
        """Drop all updates of `round_` in the transaction of `db`. The round opens again."""
        db.execute("DELETE FROM updates WHERE round = ?", (round_,))
        db.execute("DELETE FROM uploads")
        db.execute("DELETE FROM meta WHERE key = ?", (_NEEDED,))
        forget(db)

    def failures(self, round_: int) -> list[str]:
        """The devices that `round_` does not wait for."""
        with self._database.transaction() as db:
            rows = db.execute("SELECT device FROM failures WHERE round = ?", (round_,))
            return [device for (device,) in rows]

    def end(self) -> None:
        """Forget the round: it is over, or it opens again from its beginning."""
        with self._database.transaction() as db:
            forget(db)


def _note_selected(db: sqlite3.Connection, round_: int, selected: Selected) -> None:
    """Store the devices of a new opening of `round_`, in the transaction of `db`."""
    db.execute("DELETE FROM selected WHERE device NOT IN (SELECT id FROM devices)")
    (draws,) = db.execute("SELECT max(draw) FROM selected WHERE round = ?", (round_,)).fetchone()
    db.executemany(
        "INSERT INTO selected (device, round, draw) VALUES (?, ?, ?) ON CONFLICT (device) "
        "DO UPDATE SET round = excluded.round, draw = excluded.draw",
        [(device, round_, (draws or 0) + 1) for device in selected.devices],
    )
    limits = [(_GOAL, str(selected.goal)), (_NEEDED, f"{round_} {selected.needed}")]
    db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", limits)


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
