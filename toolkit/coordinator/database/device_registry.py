"""Stores join tokens and devices. Tokens and secrets are kept as hashes only."""

import hashlib
import hmac
import secrets
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from device_agent.formats.protocol.problems import UNKNOWN_TOKEN
from toolkit.coordinator.database.database import Also, Database
from toolkit.coordinator.database.joins import Token
from toolkit.coordinator.refusals import forbidden

DAY_S = 86400
TOKEN_UNKNOWN = "join.unknown-token"
USED_UP = "join.used-up-token"
MOST_LEFT = 20
"""The most devices of a kind that stay listed although they left without an update."""
Plan = Callable[[str], str | None]
"""Kind of a new device -> its submodel; None if the kind names a submodel."""
Group = tuple[str, str | None, int | None]
"""Kind, planned submodel and first round with the fallback. These decide a device's submodel."""


def hashed(secret: str) -> str:
    """The SHA-256 under which a token or secret is kept. Both are random and need no salt."""
    return hashlib.sha256(secret.encode()).hexdigest()


@dataclass(frozen=True)
class Device:
    """An enrolled device, or a device that has left.

    A `forgotten` device has lost its membership because it was away for too long; it may come back.
    `machine` is JSON. `bytes_down` and `bytes_up` count the bodies of requests and answers in all
    rounds. From round `fallback_from` on the device gets its kind's fallback. `trouble` is the last
    problem that it reported. `submodel` was planned for the device; None if its kind names a
    submodel.
    """

    id: str
    kind: str
    name: str
    secret_hash: str
    public_key: str
    machine: str
    submodel: str | None
    bytes_down: int = 0
    bytes_up: int = 0
    has_left: bool = False
    forgotten: bool = False
    fallback_from: int | None = None
    trouble: str | None = None

    @property
    def group(self) -> Group:
        """Devices of one group train the same submodel."""
        return self.kind, self.submodel, self.fallback_from


def label(device: Device) -> str:
    """The text that names this device in messages: its id, and its name if that differs."""
    return device.id if device.name == device.id else f"{device.id} ({device.name})"


class Registry:
    """The tokens and devices of one federation; `now` gives seconds since 1970.

    The devices are also kept in memory, so that a look-up takes the same time for any number of
    devices and waits for no transaction. Every change is written to the database first.
    """

    def __init__(self, database: Database, now: Callable[[], float] = time.time) -> None:
        self._database = database
        self._now = now
        self._devices: dict[str, Device] = {}
        self._by_secret: dict[str, str] = {}
        self._members_by_key: dict[str, str] = {}
        self._groups: Counter[Group] = Counter()
        self._ever: Counter[str] = Counter()
        with database.transaction() as db:
            columns = ", ".join(Device.__dataclass_fields__).replace("secret_hash", "secret")
            rows = db.execute(f"SELECT {columns} FROM devices ORDER BY rowid").fetchall()
        for row in rows:
            self._keep(Device(*row))

    def set_token(self, kind: str, token: str, count: int | None, days: float) -> None:
        """Let `token` enrol `count` devices of `kind` for `days` after the token was first set.

        With `count` None, the token enrols any number of devices.
        """
        with self._database.transaction() as db:
            db.execute(
                "INSERT INTO tokens (kind, hash, count, made, days) VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT (kind) DO UPDATE SET hash = excluded.hash, count = excluded.count, "
                "days = excluded.days, "
                "made = CASE WHEN hash = excluded.hash THEN made ELSE excluded.made END",
                (kind, hashed(token), count, self._now(), days),
            )

    def token_hashes(self) -> dict[str, str]:
        """The hash of the join token of each kind."""
        with self._database.transaction() as db:
            return dict(db.execute("SELECT kind, hash FROM tokens").fetchall())

    def enrol(
        self, token: str, name: str, public_key: str, machine: str, plan: Plan
    ) -> tuple[Device, str]:
        """Enrol a device of the token's kind, or give an enrolled device a new secret.

        Args:
            token: A join token.
            name: The device's name for people.
            public_key: The device's key. If it is the key of a member, that member joins again.
            machine: The device's machine as JSON.
            plan: Gives the submodel of a new device; it may raise RefusalError.

        Returns:
            The device and its secret.

        Raises:
            RefusalError: 403 if the token is unknown, expired or used up, or if the device with
                this key has another kind.
        """
        secret = secrets.token_urlsafe(32)
        with self._database.exclusively():
            with self._database.milestone() as db:
                allowed = _token(db, token)
                known = self._members_by_key.get(public_key)
                if known is None:
                    allowed.check_age(self._now())
                    device = Device(
                        id=self._new_place(allowed),
                        kind=allowed.kind,
                        name=name,
                        secret_hash=hashed(secret),
                        public_key=public_key,
                        machine=machine,
                        submodel=plan(allowed.kind),
                    )
                    db.execute(
                        "INSERT INTO devices (id, kind, name, secret, public_key, machine, "
                        "submodel) VALUES (?, ?, ?, ?, ?, ?, ?)",
                        (
                            device.id,
                            device.kind,
                            name,
                            device.secret_hash,
                            public_key,
                            machine,
                            device.submodel,
                        ),
                    )
                    db.execute(
                        "UPDATE join_tokens SET joined = joined + 1 WHERE number = ?",
                        (allowed.number,),
                    )
                else:
                    device = replace(
                        self._devices[known],
                        name=name,
                        machine=machine,
                        secret_hash=hashed(secret),
                    )
                    _check_kind(device, allowed)
                    db.execute(
                        "UPDATE devices SET secret = ?, name = ?, machine = ? WHERE id = ?",
                        (device.secret_hash, name, machine, known),
                    )
            self._keep(device)
        return device, secret

    def check_token(self, token: str) -> None:
        """Raise RefusalError (403) if `token` is unknown. A member may use an expired token."""
        with self._database.transaction() as db:
            _token(db, token)

    def kind(self, token: str) -> str:
        """The kind that `token` is for. Raises RefusalError (403) if the token is unknown."""
        with self._database.transaction() as db:
            return _token(db, token).kind

    def kind_if_new(self, token: str, public_key: str) -> str | None:
        """The kind of the new device with this key and `token`; None if it is already a member.

        Raises RefusalError (403) if the token cannot enrol a new device.
        """
        with self._database.exclusively():
            known = public_key in self._members_by_key
            return None if known else self.free_places(token)[0]

    def free_places(self, token: str) -> tuple[str, int | None]:
        """The kind that `token` is for, and how many more devices may join; None for any number.

        Raises RefusalError (403) for a token that is unknown, expired or used up.
        """
        with self._database.transaction() as db:
            allowed = _token(db, token)
        taken = self._taken(allowed.kind)
        allowed.check_age(self._now())
        allowed.check_free(taken)
        return allowed.kind, allowed.free(taken)

    def devices(self) -> list[Device]:
        """All devices that ever enrolled, the oldest first."""
        return list(self._devices.values())

    def device(self, identifier: str) -> Device:
        """The device with this id."""
        return self._devices[identifier]

    def members(self) -> list[Device]:
        """The devices that have not left."""
        return [device for device in self.devices() if not device.has_left]

    def member_with_key(self, public_key: str) -> Device | None:
        """The member with this key, or None."""
        identifier = self._members_by_key.get(public_key)
        return None if identifier is None else self._devices[identifier]

    def groups(self) -> list[Group]:
        """The groups that have members."""
        return list(self._groups)

    def device_with(self, secret: str) -> Device | None:
        """The device that authenticates with `secret`, or None."""
        return self.device_with_hash(hashed(secret))

    def device_with_hash(self, secret_hash: str) -> Device | None:
        """The device whose secret has this hash, or None."""
        # Nobody can choose the SHA-256 of a guess, so the time of this look-up reveals nothing.
        identifier = self._by_secret.get(secret_hash)
        return None if identifier is None else self._devices[identifier]

    def leave(self, device: str, forgotten: bool = False, also: Also = lambda db: None) -> None:
        """Free the place of `device`; its record stays. A `forgotten` device may `come_back`.

        `also` can write more in the same transaction.
        """
        with self._database.exclusively():
            self._set_left(device, True, forgotten, also)

    def drop_left(self, kind: str) -> list[str]:
        """Remove the oldest devices of `kind` that have left without an update; returns their ids.

        The last MOST_LEFT stay. Devices about which the operator has decided also stay. Without
        this limit, repeated joins and leaves would fill the disk.
        """
        with self._database.exclusively():
            with self._database.transaction() as db:
                rows = db.execute(
                    "SELECT id FROM devices WHERE kind = ? AND has_left AND NOT forgotten AND "
                    "past_updates = 0 AND id NOT IN (SELECT device FROM updates UNION "
                    "SELECT device FROM decisions) "
                    "ORDER BY rowid DESC LIMIT -1 OFFSET ?",
                    (kind, MOST_LEFT),
                ).fetchall()
                db.executemany("DELETE FROM devices WHERE id = ?", rows)
            for (identifier,) in rows:
                del self._by_secret[self._devices.pop(identifier).secret_hash]
        return [identifier for (identifier,) in rows]

    def come_back(self, device: str, also: Also = lambda db: None) -> bool:
        """Make a device a member again, with its secret, if a place is free.

        `also` can write more in the same transaction. Returns False, and changes nothing, if no
        place is free or if a member has the same key.
        """
        with self._database.exclusively():
            known = self._devices[device]
            with self._database.transaction() as db:
                (places,) = db.execute(
                    "SELECT count FROM tokens WHERE kind = ?", (known.kind,)
                ).fetchone()
            full = places is not None and self._taken(known.kind) >= places
            if full or known.public_key in self._members_by_key:
                return False
            self._set_left(device, False, False, also)
            return True

    def set_secret(self, device: str, secret_hash: str, also: Also) -> None:
        """Let `device` authenticate with the secret that has this hash, and with no other.

        `also` can write more in the same transaction.
        """
        with self._database.exclusively():
            with self._database.milestone() as db:
                db.execute("UPDATE devices SET secret = ? WHERE id = ?", (secret_hash, device))
                also(db)
            self._keep(replace(self._devices[device], secret_hash=secret_hash))

    def _set_left(self, device: str, has_left: bool, forgotten: bool, also: Also) -> None:
        with self._database.milestone() as db:
            db.execute(
                "UPDATE devices SET has_left = ?, forgotten = ? WHERE id = ?",
                (has_left, forgotten, device),
            )
            also(db)
        self._keep(replace(self._devices[device], has_left=has_left, forgotten=forgotten))

    def note_trouble(self, device: str, trouble: str, fallback_from: int | None) -> None:
        """Store the trouble that `device` reported, and the first round with its fallback."""
        with self._database.exclusively():
            with self._database.transaction() as db:
                db.execute(
                    "UPDATE devices SET trouble = ?, fallback_from = ? WHERE id = ?",
                    (trouble, fallback_from, device),
                )
            changed = replace(self._devices[device], trouble=trouble, fallback_from=fallback_from)
            self._keep(changed)

    def count_bytes(self, device: str, fetched: int = 0, sent: int = 0) -> None:
        """Add to the bytes that `device` has fetched and sent."""
        with self._database.exclusively():
            with self._database.transaction() as db:
                db.execute(
                    "UPDATE devices SET bytes_down = bytes_down + ?, bytes_up = bytes_up + ? "
                    "WHERE id = ?",
                    (fetched, sent, device),
                )
            old = self._devices[device]
            down, up = old.bytes_down + fetched, old.bytes_up + sent
            self._keep(replace(old, bytes_down=down, bytes_up=up))

    def _keep(self, device: Device) -> None:
        """Keep `device` in memory, in place of its earlier record."""
        old = self._devices.get(device.id)
        self._devices[device.id] = device
        self._by_secret[device.secret_hash] = device.id
        if old is None:
            # The highest number, not the count: some devices that have left are no longer listed.
            number = int(device.id.rpartition("-")[2])
            self._ever[device.kind] = max(self._ever[device.kind], number)
        elif old.secret_hash != device.secret_hash:
            del self._by_secret[old.secret_hash]
        if old is not None and not old.has_left:
            del self._members_by_key[old.public_key]
            self._groups[old.group] -= 1
            if not self._groups[old.group]:
                del self._groups[old.group]
        if not device.has_left:
            # Only members are found by key: a device that has left and joins again is a new device.
            self._members_by_key[device.public_key] = device.id
            self._groups[device.group] += 1

    def _new_place(self, allowed: Token) -> str:
        """The id of a new device of the token's kind. Raises RefusalError if no place is free."""
        allowed.check_free(self._taken(allowed.kind))
        return f"{allowed.kind}-{self._ever[allowed.kind] + 1}"

    def _taken(self, kind: str) -> int:
        """How many places of `kind` are taken."""
        return sum(count for group, count in self._groups.items() if group[0] == kind)


def _check_kind(known: Device, allowed: Token) -> None:
    if known.kind != allowed.kind:
        raise forbidden(
            "This token is for the kind {kind!r}, but this device has already joined as {device}, "
            "of another kind. Leave first (`edgetailor-agent leave`).",
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
    row = db.execute(
        "SELECT kind, tokens.count, expires, number, join_tokens.count, joined, revoked "
        "FROM join_tokens JOIN tokens USING (kind) WHERE join_tokens.hash = ?",
        (given,),
    ).fetchone()
    if row is not None and row[-1] is None:
        return Token(*row[:-1])
    if row is not None:
        raise forbidden(
            "This join token was revoked. Ask the operator for another one.",
            code="join.revoked-token",
        )
    raise forbidden(UNKNOWN_TOKEN, code="join.unknown-token")
