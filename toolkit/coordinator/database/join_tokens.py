"""The join tokens of a federation: one for each kind, and tokens that operators have made.

All are kept as hashes. The tokens of kinds are also in files of the state folder.
"""

import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass

from toolkit.coordinator.database.database import Database
from toolkit.coordinator.database.device_registry import DAY_S, hashed


@dataclass(frozen=True)
class JoinTokenState:
    """What a join token allows, and how far it is used.

    Attributes:
        number: The number of a token that an operator has made; None for the token of a kind.
        kind: The kind of the devices that join with it.
        count: How many devices may join; None if any number may.
        joined: How many devices have joined. For the token of a kind, devices that have left do
            not count.
        expires: The time after which no new device joins, in seconds since 1970.
        revoked: When an operator revoked it, in seconds since 1970.
    """

    number: int | None
    kind: str
    count: int | None
    joined: int
    expires: float
    revoked: float | None = None


def listed(db: sqlite3.Connection) -> list[JoinTokenState]:
    """All join tokens: tokens of kinds, then tokens that operators made, oldest first."""
    rows = db.execute(
        "SELECT NULL, kind, count, (SELECT count(*) FROM devices WHERE devices.kind = tokens.kind "
        "AND NOT has_left), made + days * ?, NULL FROM tokens UNION ALL "
        "SELECT number, kind, count, joined, expires, revoked FROM join_tokens ORDER BY 1",
        (DAY_S,),
    )
    return [JoinTokenState(*row) for row in rows]


class JoinTokens:
    """Stores the join tokens that operators have made. `now` gives seconds since 1970."""

    def __init__(self, database: Database, now: Callable[[], float] = time.time) -> None:
        self._database, self._now = database, now

    def listed(self) -> list[JoinTokenState]:
        """All join tokens, also the tokens of kinds."""
        with self._database.transaction() as db:
            return listed(db)

    def made(self, number: int) -> JoinTokenState | None:
        """The token with this number; None if there is none."""
        return next((known for known in self.listed() if known.number == number), None)

    def next_number(self) -> int:
        """The number of the next token. Numbers are never used again."""
        with self._database.transaction() as db:
            (last,) = db.execute("SELECT coalesce(max(number), 0) FROM join_tokens").fetchone()
        return int(last) + 1

    def add(
        self,
        db: sqlite3.Connection,
        number: int,
        kind: str,
        count: int | None,
        days: float,
        token: str,
    ) -> None:
        """Write a new `token` in the transaction of `db`."""
        db.execute(
            "INSERT INTO join_tokens VALUES (?, ?, ?, ?, 0, ?, NULL)",
            (number, hashed(token), kind, count, self._now() + days * DAY_S),
        )

    def revoke(self, db: sqlite3.Connection, number: int) -> None:
        """Revoke a token, in the transaction of `db`."""
        db.execute("UPDATE join_tokens SET revoked = ? WHERE number = ?", (self._now(), number))
