"""The changes of the coordinator's key, in the table `meta`, and the names of the key's files."""

import sqlite3
from collections.abc import Sequence

import msgspec

from device_agent.formats.protocol.key_changes import KeyChange
from device_agent.formats.signed_work import key_fingerprint

KEY, NEXT_KEY = "coordinator.key", "coordinator.key.next"
"""The files of the coordinator's key, and of the next key while that replaces it."""
KNOWN_KEY = "key"
"""The key in `meta` of the fingerprint of the coordinator's key."""
KEY_CHANGES = "key changes"
"""The key in `meta` of the changes, as JSON."""


def decoded(value: str | None) -> list[KeyChange]:
    """The changes in the `value` of KEY_CHANGES, the oldest first."""
    return [] if value is None else msgspec.json.decode(value, type=list[KeyChange])


def write(db: sqlite3.Connection, changes: Sequence[KeyChange]) -> None:
    """Write all `changes` in the transaction of `db`: the last new key is the coordinator's."""
    for key, value in (
        (KEY_CHANGES, msgspec.json.encode(changes).decode()),
        (KNOWN_KEY, key_fingerprint(changes[-1].new)),
    ):
        db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))
