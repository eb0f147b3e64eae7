"""The release that each device of a federation runs, for `edgetailor release`."""

from dataclasses import dataclass
from pathlib import Path

from device_agent.formats.protocol.releases import ReleaseReport
from toolkit.coordinator.database.release_reports import stored_reports
from toolkit.coordinator.storage.release_folder import Release, ReleaseFolder, offered_to
from toolkit.coordinator.storage.saved_rounds import reading


@dataclass(frozen=True)
class DeviceRelease:
    """A member and its release.

    Attributes:
        device: Its id.
        name: Its name for people.
        kind: Its kind.
        offered: The release that the device is offered; 0 if there is none.
        report: Its last report; None if it never sent one.
    """

    device: str
    name: str
    kind: str
    offered: int
    report: ReleaseReport | None

    @property
    def runs(self) -> int | None:
        """The release with which the device predicts; None if unknown."""
        return None if self.report is None else self.report.runs

    @property
    def answer(self) -> str:
        """What the device has done with the offered release."""
        if self.report is not None and self.report.runs == self.offered:
            return "taken" if self.offered else ""
        if self.report is None or self.report.number != self.offered:
            return "waiting" if self.offered or self.report is not None else ""
        return "not taken"


def release_status(state: Path) -> tuple[tuple[Release, ...], list[DeviceRelease]]:
    """All releases of the federation in `state`, and the release of each member.

    Raises InputError if `state` is not a state folder.
    """
    with reading(state) as db:
        rows = db.execute(
            "SELECT id, name, kind FROM devices WHERE NOT has_left ORDER BY rowid"
        ).fetchall()
        reports = stored_reports(db)
    releases = ReleaseFolder(state).read()
    return releases, [
        DeviceRelease(device, name, kind, offered_to(releases, device, kind), reports.get(device))
        for device, name, kind in rows
    ]
