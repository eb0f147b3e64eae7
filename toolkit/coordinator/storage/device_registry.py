"""Join tokens and devices; their secrets are kept as hashes only."""

import hashlib
import hmac
import secrets
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from device_agent.formats.protocol import UNKNOWN_TOKEN
from profiles.text_formatting import counted
from toolkit.coordinator.refusals import forbidden
from toolkit.coordinator.storage.database import Database

DAY_S = 86400
TOKEN_UNKNOWN = "join.unknown-token"
USED_UP = "join.used-up-token"
Plan = Callable[[str], str | None]
"""Kind of a new device -> its submodel; None if the kind names one."""


def hashed(secret: str) -> str:
    """The SHA-256 that is kept of a token or secret. They are random, so no salt is needed."""
    return hashlib.sha256(secret.encode()).hexdigest()


@dataclass(frozen=True)
class Device:
    """An enrolled device, or one that has left; bytes count bodies over all rounds.

    `machine` is JSON. From round `fallback_from` on the device gets its kind's fallback; `trouble`
    is what it last reported. `submodel` was planned for it; None if its kind names one.
    """

    id: str
    kind: str
    name: str
    secret_hash: str
    bytes_down: int
    bytes_up: int
    public_key: str
    machine: str
    has_left: bool
    fallback_from: int | None
    trouble: str | None
    submodel: str | None


def label(device: Device) -> str:
    """A device for people: its id, and its name if it differs."""
    return device.id if device.name == device.id else f"{device.id} ({device.name})"


@dataclass(frozen=True)
class Token:
    """A join token for `count` devices of `kind`; `expires` is in seconds since 1970."""

    kind: str
    count: int
    expires: float

    def check_age(self, now: float) -> None:
        """Raise RefusalError (403) if the token has expired by `now`."""
        if now > self.expires:
            raise forbidden(
                f"This join token expired on {datetime.fromtimestamp(self.expires, UTC):%Y-%m-%d}. "
                f"To make a new one, the operator removes tokens/{self.kind}.token from the "
                "coordinator's state folder and starts `edgetailor serve` again.",
                code="join.expired-token",
                kind=self.kind,
            )

    def check_free(self, used: int) -> None:
        """Raise RefusalError (403) if `used` devices leave no place."""
        if used >= self.count:
            raise forbidden(
                f"This join token is used up: it is for {counted(self.count, 'device')} of kind "
                f"{self.kind!r}. Use the token of another kind, or start a federation with more.",
                code="join.used-up-token",
                kind=self.kind,
                devices=self.count,
            )


class Registry:
    """The tokens and devices of one federation; `now` gives seconds since 1970."""

    def __init__(self, database: Database, now: Callable[[], float] = time.time) -> None:
        self._database = database
        self._now = now

    def set_token(self, kind: str, token: str, count: int, days: float) -> None:
        """Let `token` enrol `count` devices of `kind`, for `days` from the day it was made."""
        with self._database.transaction() as db:
            db.execute(
                "INSERT INTO tokens (kind, hash, count, made, days) VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT (kind) DO UPDATE SET hash = excluded.hash, count = excluded.count, "
                "days = excluded.days, "
                "made = CASE WHEN hash = excluded.hash THEN made ELSE excluded.made END",
                (kind, hashed(token), count, self._now(), days),
            )

    def enrol(
        self, token: str, name: str, public_key: str, machine: str, plan: Plan
    ) -> tuple[Device, str]:
        """Enrol a device of the token's kind, or give an enrolled one a new secret.

        Args:
            token: A join token.
            name: The device's name for people.
            public_key: The device's key. A key that has enrolled gives its device again.
            machine: The device's machine as JSON.
            plan: Gives the submodel of a new device; it may raise RefusalError.

        Returns:
            The device and its secret.

        Raises:
            RefusalError: 403 for a token that is unknown, expired, used up or of another kind
                than the key's device.
        """
        secret = secrets.token_urlsafe(32)
        with self._database.milestone() as db:
            allowed = _token(db, token)
            known = _device_of(db, public_key)
            if known is None:
                allowed.check_age(self._now())
                identifier = _new_place(db, allowed)
                db.execute(
                    "INSERT INTO devices (id, kind, name, secret, public_key, machine, submodel) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (
                        *(identifier, allowed.kind, name, hashed(secret), public_key, machine),
                        plan(allowed.kind),
                    ),
                )
            else:
                _check_kind(known, allowed)
                db.execute(
                    "UPDATE devices SET secret = ?, name = ?, machine = ? WHERE id = ?",
                    (hashed(secret), name, machine, known.id),
                )
            enrolled = _device_of(db, public_key)
        assert enrolled is not None
        return enrolled, secret

    def check_token(self, token: str) -> None:
        """Raise RefusalError (403) if `token` is unknown. A known device may use an old one."""
        with self._database.transaction() as db:
            _token(db, token)

    def free_places(self, token: str) -> tuple[str, int]:
        """The kind of device that `token` enrols, and how many more of them.

        Raises RefusalError (403) for a token that is unknown, expired or used up.
        """
        with self._database.transaction() as db:
            allowed = _token(db, token)
            ever, gone = _taken(db, allowed.kind)
        allowed.check_age(self._now())
        allowed.check_free(ever - gone)
        return allowed.kind, allowed.count - (ever - gone)

    def devices(self) -> list[Device]:
        """All devices that ever enrolled, the oldest first."""
        with self._database.transaction() as db:
            return _devices(db, "")

    def members(self) -> list[Device]:
        """The devices that have not left."""
        return [device for device in self.devices() if not device.has_left]

    def device_with(self, secret: str) -> Device | None:
        """The device that authenticates with `secret`, or None."""
        given = hashed(secret)
        matching = (d for d in self.devices() if hmac.compare_digest(d.secret_hash, given))
        return next(matching, None)

    def leave(self, device: str) -> None:
        """Free the place of `device`; its record stays."""
        with self._database.milestone() as db:
            db.execute("UPDATE devices SET has_left = 1 WHERE id = ?", (device,))

    def note_trouble(self, device: str, trouble: str, fallback_from: int | None) -> None:
        """Keep what `device` reported, and the first round with its fallback."""
        with self._database.transaction() as db:
            db.execute(
                "UPDATE devices SET trouble = ?, fallback_from = ? WHERE id = ?",
                (trouble, fallback_from, device),
            )

    def count_fetched(self, device: str, size: int) -> None:
        """Add `size` to the bytes that `device` has fetched."""
        with self._database.transaction() as db:
            db.execute(
                "UPDATE devices SET bytes_down = bytes_down + ? WHERE id = ?", (size, device)
            )


def _devices(db: sqlite3.Connection, where: str, *values: str) -> list[Device]:
    columns = (
        "id, kind, name, secret, bytes_down, bytes_up, public_key, machine, has_left, "
        "fallback_from, trouble, submodel"
    )
    rows = db.execute(f"SELECT {columns} FROM devices {where} ORDER BY rowid", values)
    return [Device(*row) for row in rows]


def _device_of(db: sqlite3.Connection, public_key: str) -> Device | None:
    """The member with this key. One that has left and comes back is a new device."""
    found = _devices(db, "WHERE public_key = ? AND has_left = 0", public_key)
    return found[0] if found else None


def _new_place(db: sqlite3.Connection, allowed: Token) -> str:
    """The id of one more device of the token's kind. Raises RefusalError if it is used up."""
    ever, gone = _taken(db, allowed.kind)
    allowed.check_free(ever - gone)
    return f"{allowed.kind}-{ever + 1}"


def _taken(db: sqlite3.Connection, kind: str) -> tuple[int, int]:
    """How many devices of `kind` ever enrolled, and how many of them have left."""
    query = "SELECT count(*), coalesce(sum(has_left), 0) FROM devices WHERE kind = ?"
    ever, gone = db.execute(query, (kind,)).fetchone()
    return ever, gone


def _check_kind(known: Device, allowed: Token) -> None:
    if known.kind != allowed.kind:
        raise forbidden(
            f"This device is {known.id} already, and the token is for the kind {allowed.kind!r}: "
            "let it leave first (`edgetailor-agent leave`).",
            code="join.other-kind",
            device=known.id,
            kind=allowed.kind,
        )


def _token(db: sqlite3.Connection, token: str) -> Token:
    given = hashed(token)
    for kind, known, count, made, days in db.execute(
        "SELECT kind, hash, count, made, days FROM tokens"
    ):
        if hmac.compare_digest(known, given):
            return Token(kind, count, made + days * DAY_S)
    raise forbidden(UNKNOWN_TOKEN, code="join.unknown-token")
