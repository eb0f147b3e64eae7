"""Who may join and who has: tokens and devices, their secrets kept as hashes only."""

import hashlib
import hmac
import secrets
import sqlite3
from dataclasses import dataclass

from device_agent.wording import counted
from toolkit.coordinator.database import Database
from toolkit.coordinator.refusals import forbidden


def hashed(secret: str) -> str:
    """What is kept of a token or secret: its SHA-256 (they are random, so no salt is needed)."""
    return hashlib.sha256(secret.encode()).hexdigest()


@dataclass(frozen=True)
class Device:
    """An enrolled device; bytes count bodies over all rounds."""

    id: str
    kind: str
    name: str
    secret_hash: str
    bytes_down: int
    bytes_up: int


class Registry:
    """The tokens and devices of one federation."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def set_token(self, kind: str, token: str, count: int) -> None:
        """Let `token` enrol devices of `kind`, `count` in all."""
        with self._database.transaction() as db:
            db.execute(
                "INSERT OR REPLACE INTO tokens VALUES (?, ?, ?)", (kind, hashed(token), count)
            )

    def enrol(self, token: str, name: str) -> tuple[Device, str]:
        """Make a device of the token's kind; returns it and its secret.

        Raises RefusalError (403) for an unknown token and for one that is used up.
        """
        with self._database.transaction() as db:
            kind, count = _token(db, token)
            used = db.execute("SELECT count(*) FROM devices WHERE kind = ?", (kind,))
            number = int(used.fetchone()[0]) + 1
            if number > count:
                raise forbidden(
                    f"This join token is used up: it is for {counted(count, 'device')} of kind "
                    f"{kind!r}. Use the token of another kind, or start a federation with more."
                )
            secret = secrets.token_urlsafe(32)
            device = Device(f"{kind}-{number}", kind, name, hashed(secret), 0, 0)
            db.execute(
                "INSERT INTO devices (id, kind, name, secret) VALUES (?, ?, ?, ?)",
                (device.id, kind, name, device.secret_hash),
            )
            return device, secret

    def devices(self) -> list[Device]:
        """All enrolled devices, in the order in which they came."""
        columns = "id, kind, name, secret, bytes_down, bytes_up"
        with self._database.transaction() as db:
            rows = db.execute(f"SELECT {columns} FROM devices ORDER BY rowid").fetchall()
        return [Device(*row) for row in rows]

    def device_with(self, secret: str) -> Device | None:
        """The device that authenticates with `secret`, if there is one."""
        given = hashed(secret)
        matching = (d for d in self.devices() if hmac.compare_digest(d.secret_hash, given))
        return next(matching, None)

    def count_fetched(self, device: str, size: int) -> None:
        """Add `size` to the bytes that `device` has fetched."""
        with self._database.transaction() as db:
            db.execute(
                "UPDATE devices SET bytes_down = bytes_down + ? WHERE id = ?", (size, device)
            )


def _token(db: sqlite3.Connection, token: str) -> tuple[str, int]:
    given = hashed(token)
    for kind, known, count in db.execute("SELECT kind, hash, count FROM tokens"):
        if hmac.compare_digest(known, given):
            return kind, count
    raise forbidden(
        "This join token is unknown here: give the content of one of the .token files that "
        "`edgetailor serve` names when it starts."
    )
