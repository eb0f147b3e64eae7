"""The operator's decisions about devices, and the log of all actions, which only grows."""

import sqlite3
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from toolkit.coordinator.database.database import Also, Database

Outcome = Literal["paused", "removed", "banned"]
PAUSED: Outcome = "paused"
REMOVED: Outcome = "removed"
BANNED: Outcome = "banned"
BY_JUDGE = "by the judge"
"""The reason of a pause begins with this text if no operator decided the pause."""
_PAUSE = "rounds paused"
"""The key in the table `meta` of the reason why no round opens."""


@dataclass(frozen=True)
class Decision:
    """The operator's decision about the device with this public key, and the reason.

    `member` tells whether the device was a member before.
    """

    outcome: Outcome
    reason: str
    public_key: str
    member: bool = True

    def text(self) -> str:
        """The decision as part of a sentence.

        Examples:
            >>> Decision("paused", "broken sensor", "key").text()
            'paused by the operator: broken sensor'
        """
        if self.reason.startswith(BY_JUDGE):
            return f"{self.outcome} {self.reason}"
        return f"{self.outcome} by the operator: {self.reason}"


@dataclass(frozen=True)
class AuditEntry:
    """One action of the operator; entries are numbered from 1 and never change.

    `at` is in seconds since 1970. `who` names the token that was used, and `target` names a device
    or a round.
    """

    number: int
    at: float
    who: str
    action: str
    target: str
    reason: str


@dataclass(frozen=True)
class Action:
    """An action of the operator.

    `who` names the token that was used. `then` is the decision about the device that is valid after
    the action.
    """

    action: str
    target: str
    who: str
    reason: str
    then: Decision | None = None


class OperatorLog:
    """Stores decisions and the audit log. `now` gives seconds since 1970.

    Attributes:
        decisions: The decision about each device that has one. Every write makes a new mapping.
        pause_reason: Why no round opens; None if rounds open.
    """

    def __init__(self, database: Database, now: Callable[[], float] = time.time) -> None:
        self._database, self._now = database, now
        self.decisions: dict[str, Decision] = {}
        self.pause_reason: str | None = None
        self.read()

    def read(self) -> None:
        """Read the decisions again. Call it after a transaction that called `write`."""
        with self._database.transaction() as db:
            rows = db.execute("SELECT device, outcome, reason, public_key, member FROM decisions")
            self.decisions = {
                device: Decision(outcome, reason, public_key, bool(member))
                for device, outcome, reason, public_key, member in rows
            }
            pause = db.execute("SELECT value FROM meta WHERE key = ?", (_PAUSE,)).fetchone()
        self.pause_reason = None if pause is None else pause[0]

    def set_pause(self, db: sqlite3.Connection, reason: str | None) -> None:
        """Pause the rounds for `reason`, in the transaction of `db`. None ends the pause."""
        db.execute("DELETE FROM meta WHERE key = ?", (_PAUSE,))
        if reason is not None:
            db.execute("INSERT INTO meta VALUES (?, ?)", (_PAUSE, reason))

    def write(self, db: sqlite3.Connection, action: Action) -> None:
        """Write an action and its decision in the transaction of `db`."""
        db.execute(
            "INSERT INTO audit (at, who, action, target, reason) VALUES (?, ?, ?, ?, ?)",
            (self._now(), action.who, action.action, action.target, action.reason),
        )
        db.execute("DELETE FROM decisions WHERE device = ?", (action.target,))
        if action.then is not None:
            then = action.then
            db.execute(
                "INSERT INTO decisions VALUES (?, ?, ?, ?, ?)",
                (action.target, then.outcome, then.reason, then.public_key, then.member),
            )

    def record(self, action: Action, also: Also = lambda db: None) -> None:
        """Write an action to the log. `also` writes its changes in the same transaction."""
        self.record_all([action], also)

    def record_all(self, actions: Iterable[Action], also: Also = lambda db: None) -> None:
        """Write several actions to the log. `also` writes its changes in the same transaction."""
        with self._database.milestone() as db:
            for action in actions:
                self.write(db, action)
            also(db)
        self.read()

    def end_pause(self, db: sqlite3.Connection, device: str) -> None:
        """Forget the pause of a `device` that leaves, in the transaction of `db`."""
        db.execute("DELETE FROM decisions WHERE device = ? AND outcome = ?", (device, PAUSED))

    def banned(self, public_key: str) -> dict[str, Decision]:
        """The bans of devices with this key, by device."""
        return {
            device: decision
            for device, decision in self.decisions.items()
            if decision.outcome == BANNED and decision.public_key == public_key
        }

    def entries(self, after: int, most: int, device: str | None = None) -> list[AuditEntry]:
        """Up to `most` entries of the audit log.

        Without `device`, these are the entries after number `after`, the oldest first. With
        `device`, these are entries about this device, the newest first.
        """
        query = "SELECT number, at, who, action, target, reason FROM audit WHERE "
        with self._database.transaction() as db:
            if device is None:
                query += "number > ? ORDER BY number LIMIT ?"
                rows = db.execute(query, (after, most))
            else:
                query += "target = ? ORDER BY number DESC LIMIT ?"
                rows = db.execute(query, (device, most))
            return [AuditEntry(*row) for row in rows]

    def last(self) -> int:
        """The number of the newest entry; 0 if there is none."""
        with self._database.transaction() as db:
            return int(db.execute("SELECT coalesce(max(number), 0) FROM audit").fetchone()[0])
