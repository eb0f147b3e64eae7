"""The changes of the coordinator's key, the devices that know them, and the names of key files."""

import sqlite3
from collections.abc import Sequence

import msgspec

from device_agent.formats.protocol.key_changes import KeyChange
from device_agent.formats.signed_work import key_fingerprint
from toolkit.coordinator.database.database import Database

KEY, NEXT_KEY = "coordinator.key", "coordinator.key.next"
"""The file of the coordinator's key, and the file of the next key during a replacement."""
KNOWN_KEY = "key"
"""The key in `meta` of the fingerprint of the coordinator's key."""
KEY_CHANGES = "key changes"
"""The key in `meta` of the changes, as JSON."""


def decoded(value: str | None) -> list[KeyChange]:
    """The changes in the `value` of KEY_CHANGES, the oldest first."""
    return [] if value is None else msgspec.json.decode(value, type=list[KeyChange])


def write(db: sqlite3.Connection, changes: Sequence[KeyChange]) -> None:
    """Write all `changes` in the transaction of `db`. The last one leads to the current key."""
    for key, value in (
        (KEY_CHANGES, msgspec.json.encode(changes).decode()),
        (KNOWN_KEY, key_fingerprint(changes[-1].new)),
    ):
        db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))


_PREFIX = "key of "


class TrustedKeys:
    """Stores which key of the coordinator each device is known to trust, by its fingerprint.

    Attributes:
        by_device: The fingerprints, by device. A device has an entry if it joined or trained after
            the key was first replaced.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        with database.transaction() as db:
            rows = db.execute("SELECT key, value FROM meta WHERE key LIKE ?", (f"{_PREFIX}%",))
            self.by_device: dict[str, str] = {key.removeprefix(_PREFIX): key_ for key, key_ in rows}

    def note(self, device: str, fingerprint: str) -> None:
        """Record that `device` trusts the key with this `fingerprint`."""
        if self.by_device.get(device) == fingerprint:
            return
        with self._database.transaction() as db:
            row = (_PREFIX + device, fingerprint)
            db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", row)
        self.by_device[device] = fingerprint

    def forget(self, device: str) -> None:
        """Forget the key of a `device` that has left."""
        if device in self.by_device:
            with self._database.transaction() as db:
                db.execute("DELETE FROM meta WHERE key = ?", (_PREFIX + device,))
            del self.by_device[device]
