"""Reads facts about each device from the records of its earlier updates."""

import json
from collections.abc import Sequence

import msgspec

from device_agent.formats.update import UpdateRecord
from profiles.documents.bundle_profile import Profile
from profiles.documents.bundle_profile_reading import same_hardware
from toolkit.coordinator.database.database import Database


class UpdateRecords:
    """Reads the tables `updates` and `past_updates`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def senders(self, round_: int) -> set[str]:
        """The devices whose updates of `round_` have come."""
        with self._database.transaction() as db:
            rows = db.execute("SELECT device FROM updates WHERE round = ?", (round_,))
            return {device for (device,) in rows}

    def profiles(self, device: str) -> list[Profile]:
        """The profiles that `device` measured in rounds on its present machine, oldest first.

        A device may move to another machine with its state folder. Profiles of the previous
        machine stay in the updates' records and are left out here.
        """
        with self._database.transaction() as db:
            rows = db.execute(
                "SELECT record FROM updates WHERE device = ? ORDER BY round", (device,)
            ).fetchall()
        records = (msgspec.json.decode(record, type=UpdateRecord) for (record,) in rows)
        profiles = [record.profile for record in records if record.profile is not None]
        return [
            profile for profile in profiles if same_hardware(profile.machine, profiles[-1].machine)
        ]

    def rounds_trained(self, devices: Sequence[str] | None = None) -> dict[str, int]:
        """The number of updates by device: of all devices, or of `devices` only."""
        chosen = "" if devices is None else " WHERE id IN (SELECT value FROM json_each(?))"
        with self._database.transaction() as db:
            rows = db.execute(
                "SELECT id, past_updates + coalesce(recent, 0) FROM devices LEFT JOIN "
                "(SELECT device, count(*) AS recent FROM updates GROUP BY device) ON device = id"
                + chosen,
                () if devices is None else (json.dumps(devices),),
            )
            return dict(rows.fetchall())

    def updates_of(self, device: str, most: int) -> list[tuple[int, int, int, float, float]]:
        """The newest updates of `device`: round, samples, steps, first and last loss."""
        columns = "SELECT round, samples, steps, loss_first, loss_last FROM"
        with self._database.transaction() as db:
            return db.execute(
                f"{columns} updates WHERE device = :device UNION "
                f"{columns} past_updates WHERE device = :device ORDER BY round DESC LIMIT :most",
                {"device": device, "most": most},
            ).fetchall()
