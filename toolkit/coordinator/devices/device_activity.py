"""What each device was last seen doing, and how that is told."""

from dataclasses import dataclass

from device_agent.formats.protocol import DeviceStatus
from toolkit.coordinator.storage.device_registry import Device

WORKING = ("downloading", "training", "uploading")


@dataclass
class DeviceActivity:
    """What a device was last seen doing; `at` in seconds of the coordinator's clock.

    `round` is the one that it was last given work for, `missed` one that closed before its update
    came; None once a later update has.
    """

    at: float
    state: str = "enrolled"
    loss: float | None = None
    note: str | None = None
    round: int | None = None
    missed: int | None = None

    def told(self, device: Device, submodel: str, trained: int, now: float) -> DeviceStatus:
        """The status of `device`, which trains `submodel` and has had `trained` updates taken."""
        late = None if self.missed is None else f"missed the deadline of round {self.missed}"
        return DeviceStatus(
            device=device.id,
            name=device.name,
            submodel=submodel,
            state=self.state,
            loss=self.loss,
            rounds_trained=trained,
            bytes_down=device.bytes_down,
            bytes_up=device.bytes_up,
            idle_s=now - self.at,
            note=self.note or late or device.trouble,
            round=self.round if self.state in WORKING else None,
        )
