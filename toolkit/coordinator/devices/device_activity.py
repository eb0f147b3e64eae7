"""The last known activity of each device, and its status."""

from collections.abc import Sequence
from dataclasses import dataclass

from device_agent.formats.protocol.fleet import DeviceStatus, RoundResult
from device_agent.formats.protocol.releases import ReleaseReport
from toolkit.coordinator.database.device_registry import Device

WORKING = ("downloading", "training", "uploading")
"""States of a device that works for a round."""


@dataclass
class DeviceActivity:
    """The last known activity of a device.

    Attributes:
        seen_at: When the device last sent a request, in seconds of the coordinator's clock.
        state: The state that the device reported.
        loss: The last loss that the device reported.
        note: Why the device is paused or has stopped, if it has told the reason.
        round: The last round for which the device got work.
        offered_key: The fingerprint of the key that signed its last work.
        missed: Why its last update is not in a round, for example because the round closed before
            the update came. None after the device has sent a later update or reported a failure.
        not_needed_in: The last round that closed with enough updates before the device's update
            came.
        has_come: Whether a request has come since a round last selected the device, or since the
            coordinator started.
        inputs: How the inputs of the last update differ from the coordinator's samples. Set only
            if they differ much.
        told: The reason that was logged when the device stopped. None after a later update has
            come.
        judges_last: Whether the device got the work of judging the last model.
    """

    seen_at: float
    state: str = "enrolled"
    loss: float | None = None
    note: str | None = None
    round: int | None = None
    offered_key: str = ""
    missed: str | None = None
    not_needed_in: int | None = None
    has_come: bool = False
    told: str | None = None
    inputs: str | None = None
    judges_last: bool = False

    def status(
        self,
        device: Device,
        submodel: str,
        rounds_trained: int,
        now: float,
        last: Sequence[RoundResult],
        report: ReleaseReport | None = None,
        offered: int | None = None,
        limited: str | None = None,
    ) -> DeviceStatus:
        """The status of `device`, which trains `submodel`, at the time `now`.

        `last` is the result of the last round, if there is one. `report` is the device's last
        report about a release, and `offered` is the number of the newest release. `limited` says
        how its updates were limited.
        """
        unused = next((_left_out(device.id, result) for result in last), None)
        return DeviceStatus(
            device=device.id,
            name=device.name,
            submodel=submodel,
            state=self.state,
            loss=self.loss,
            rounds_trained=rounds_trained,
            bytes_down=device.bytes_down,
            bytes_up=device.bytes_up,
            idle_s=now - self.seen_at,
            note=self.note
            or self.missed
            or self.not_needed(max((one.round for one in last), default=0))
            or unused
            or limited
            or device.trouble
            or self.inputs
            or (None if report is None or report.number != offered else refusal(report)),
            round=self.round if self.state in WORKING else None,
            release=None if report is None else report.runs,
        )

    def not_needed(self, done: int) -> str | None:
        """A text if the device's update was not needed in the last of `done` rounds; else None."""
        if self.not_needed_in is None or done > self.not_needed_in:
            return None
        return f"not needed in round {self.not_needed_in}: enough updates had come"


def refusal(report: ReleaseReport) -> str | None:
    """Why the device did not take the release; None if it did."""
    return None if report.taken else f"release {report.number} was not taken: {report.reason}"


def _left_out(device: str, result: RoundResult) -> str | None:
    """Why the update of `device` is not in the model of the last round; None if it is."""
    reason = result.left_out.get(device)
    return reason and f"its update of round {result.round} was left out: {reason}"
