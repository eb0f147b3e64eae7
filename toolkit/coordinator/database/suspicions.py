"""Which device may have spoilt the global model, and which devices are therefore left out."""

import sqlite3
from typing import TypeVar

import msgspec

from device_agent.formats.manifest import Struct
from toolkit.coordinator.database.database import Database

SUSPECT, LEFT_OUT, WENT_BACK = "suspect", "left out", "went back"
"""Keys of the table `meta`."""


class Suspect(Struct, frozen=True, kw_only=True):
    """The device whose update may have spoilt the model of `round`.

    Updates are compared with other numbers (see `update_bounds.py`). The device's update exceeds
    these numbers by more than any other update of the round does. `reason` says by how much.
    """

    round: int
    device: str
    reason: str


class WentBack(Struct, frozen=True, kw_only=True):
    """A text about a spoilt model, shown to the operator until round `after` + 1 ends."""

    after: int
    text: str


class Suspicions:
    """Stores what is known about spoilt models, so that it survives a restart.

    Attributes:
        left_out: The devices that are left out of all rounds, with the reasons.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        with database.transaction() as db:
            self.left_out = _read(db, LEFT_OUT, dict[str, str]) or {}

    def note_suspect(self, suspect: Suspect) -> None:
        """Store which device may have spoilt the model of the round that is being aggregated."""
        with self._database.transaction() as db:
            _write(db, SUSPECT, suspect)

    def suspect(self, round_: int | None) -> Suspect | None:
        """The device that may have spoilt the model of `round_`; None if no update stands out."""
        with self._database.transaction() as db:
            suspect = _read(db, SUSPECT, Suspect)
        return suspect if suspect is not None and suspect.round == round_ else None

    def leave_out(self, suspect: Suspect, db: sqlite3.Connection) -> None:
        """Leave the device of `suspect` out of all later rounds, in the transaction of `db`."""
        self.left_out = {**self.left_out, suspect.device: suspect.reason}
        _write(db, LEFT_OUT, self.left_out)

    def note_spoilt(self, after: int, text: str) -> None:
        """Store a text, which the operator sees until round `after` + 1 ends."""
        with self._database.transaction() as db:
            _write(db, WENT_BACK, WentBack(after=after, text=text))

    def spoilt(self, last: int) -> list[str]:
        """A list with the text that is shown after round `last`; empty if there is none."""
        with self._database.transaction() as db:
            went_back = _read(db, WENT_BACK, WentBack)
        return [went_back.text] if went_back is not None and went_back.after == last else []


Kept = TypeVar("Kept")


def _read(db: sqlite3.Connection, key: str, kind: type[Kept]) -> Kept | None:
    row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return None if row is None else msgspec.json.decode(row[0], type=kind)


def _write(db: sqlite3.Connection, key: str, value: object) -> None:
    text = msgspec.json.encode(value).decode()
    db.execute(
        "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
        (key, text),
    )
