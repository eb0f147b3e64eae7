"""The named tokens of people and programs that operate a federation; kept as hashes only."""

import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from toolkit.coordinator.database.database import Database
from toolkit.coordinator.database.device_registry import hashed

Role = Literal["operator", "read-only"]
OPERATOR: Role = "operator"
READ_ONLY: Role = "read-only"


@dataclass(frozen=True)
class Operator:
    """The holder of a token. The audit log has the `name`; `role` says what the token allows.

    `made` and `revoked` are in seconds since 1970. A revoked token is no longer valid.
    """

    name: str
    role: Role
    made: float
    revoked: float | None = None


class OperatorTokens:
    """Stores the tokens that operators have made. `now` gives seconds since 1970.

    The tokens are also kept in memory, so that a look-up waits for no transaction. A name is never
    given to a second holder, because the audit log shows only names.
    """

    def __init__(self, database: Database, now: Callable[[], float] = time.time) -> None:
        self._database, self._now = database, now
        self.operators: dict[str, Operator] = {}
        self._by_hash: dict[str, Operator] = {}
        self.read()

    def read(self) -> None:
        """Read the tokens, after a transaction that called `add` or `revoke`."""
        with self._database.transaction() as db:
            rows = db.execute(
                "SELECT hash, name, role, made, revoked FROM operators ORDER BY rowid"
            ).fetchall()
        self._by_hash = {digest: Operator(*rest) for digest, *rest in rows}
        self.operators = {known.name: known for known in self._by_hash.values()}

    def add(self, db: sqlite3.Connection, name: str, role: Role, token: str) -> None:
        """Write a new `token` in the transaction of `db`."""
        row = name, hashed(token), role, self._now()
        db.execute("INSERT INTO operators VALUES (?, ?, ?, ?, NULL)", row)

    def revoke(self, db: sqlite3.Connection, name: str) -> None:
        """Revoke the token of `name`, in the transaction of `db`."""
        db.execute("UPDATE operators SET revoked = ? WHERE name = ?", (self._now(), name))

    def holder(self, token: str) -> Operator | None:
        """The holder of this token; None if the token is not valid."""
        # Nobody can choose the SHA-256 of a guess, so the time of this look-up reveals nothing.
        known = self._by_hash.get(hashed(token))
        return None if known is None or known.revoked is not None else known
