"""The devices that must change their secret, in the table `meta`."""

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

DUE_SECRETS = "secrets due"
"""The key in `meta` of the secrets that are due, as JSON."""


@dataclass(frozen=True)
class DueSecret:
    """The operator has asked a device for a new secret.

    The device answers `challenge`. Its old secret is valid until it answers, and at most until
    `until`, in seconds since 1970.
    """

    challenge: str
    until: int


Due = Mapping[str, DueSecret]
"""The due secrets, by device."""


def decoded(value: str | None) -> Due:
    """The due secrets in the `value` of DUE_SECRETS."""
    return {} if value is None else msgspec.json.decode(value, type=dict[str, DueSecret])


def encoded(due: Due) -> str:
    """The value of DUE_SECRETS for all secrets in `due`."""
    return msgspec.json.encode(due).decode()


def write(db: sqlite3.Connection, due: Due) -> None:
    """Write all due secrets, in the transaction of `db`."""
    db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (DUE_SECRETS, encoded(due)))
