"""The last report of each device about releases."""

import sqlite3

from device_agent.formats.manifest import encode
from device_agent.formats.protocol.releases import ReleaseReport
from profiles.json_decoding import decode_json
from toolkit.coordinator.database.database import Database

_PREFIX = "release:"
"""The prefix of a device's id in the keys of the table `meta`."""


class ReleaseReports:
    """Stores the last report of each device. The reports are also kept in memory."""

    def __init__(self, database: Database) -> None:
        self._database = database
        with database.transaction() as db:
            self._reports = stored_reports(db)

    def note(self, device: str, report: ReleaseReport) -> None:
        """Store the report of `device`. It replaces the device's earlier report."""
        if self._reports.get(device) == report:
            return
        with self._database.exclusively():
            with self._database.transaction() as db:
                value = (_PREFIX + device, encode(report).decode())
                db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", value)
            self._reports[device] = report

    def forget(self, device: str) -> None:
        """Forget the report of a device that has left."""
        with self._database.exclusively():
            with self._database.transaction() as db:
                db.execute("DELETE FROM meta WHERE key = ?", (_PREFIX + device,))
            self._reports.pop(device, None)

    def of(self, device: str) -> ReleaseReport | None:
        """The last report of `device`."""
        return self._reports.get(device)


def stored_reports(db: sqlite3.Connection) -> dict[str, ReleaseReport]:
    """The last report of each device in a federation's database."""
    rows = db.execute("SELECT key, value FROM meta WHERE key LIKE ?", (f"{_PREFIX}%",)).fetchall()
    return {key.removeprefix(_PREFIX): decode_json(value, ReleaseReport) for key, value in rows}
