"""Which devices have said that they stop, and why. A restart must not wait for them again."""

from toolkit.coordinator.storage.database import Database

_PREFIX = "stopped:"
"""Before a device's id, in the keys of the table `meta`."""


class StoppedDevices:
    """The devices that have stopped, in the database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def note(self, device: str, reason: str) -> None:
        """Note that `device` has stopped for `reason`."""
        with self._database.transaction() as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (_PREFIX + device, reason))

    def forget(self, device: str) -> None:
        """Forget that `device` has stopped."""
        with self._database.transaction() as db:
            db.execute("DELETE FROM meta WHERE key = ?", (_PREFIX + device,))

    def reasons(self) -> dict[str, str]:
        """The reason of each device that has stopped."""
        with self._database.transaction() as db:
            rows = db.execute("SELECT key, value FROM meta WHERE key LIKE ?", (f"{_PREFIX}%",))
            return {key.removeprefix(_PREFIX): reason for key, reason in rows}
