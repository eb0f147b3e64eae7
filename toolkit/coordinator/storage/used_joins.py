"""Joins that were taken: somebody who has copied one must not get the device's secret with it."""

import hashlib

from toolkit.coordinator.storage.database import Database

_PREFIX = "join:"
"""Before the hash of what was signed, in the keys of the table `meta`."""


class UsedJoins:
    """What devices have signed to join, for as long as it could be repeated."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def take(self, signed: bytes, now: float, valid_s: float) -> bool:
        """Note the text `signed` of a join. Returns whether it is new.

        Those are forgotten that were noted `valid_s` seconds before `now`.
        """
        key = _PREFIX + hashlib.sha256(signed).hexdigest()
        with self._database.transaction() as db:
            db.execute(
                "DELETE FROM meta WHERE key LIKE ? AND CAST(value AS REAL) < ?",
                (f"{_PREFIX}%", now - valid_s),
            )
            row = db.execute("INSERT OR IGNORE INTO meta VALUES (?, ?)", (key, str(now)))
            return row.rowcount == 1
