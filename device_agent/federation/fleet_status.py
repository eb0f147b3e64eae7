"""The fleet as the coordinator sees it, for `edgetailor-agent status`."""

from collections.abc import Iterator
from pathlib import Path

from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.federation.device_state import DeviceState
from device_agent.formats.protocol import DeviceStatus, Status
from profiles.text_formatting import have_joined, wrapped

PATIENCE_S = 5.0
"""How long a coordinator that does not answer is asked again."""
LEAST = ("", " " * 16, " " * 12)
"""Columns are as wide as this at least."""
LABEL = 27
"""The most characters that are shown of a device's id and name."""


def fleet_status(state: Path) -> Status:
    """Ask the coordinator that the device of the folder `state` belongs to.

    Raises InputError where it belongs to none, ClientError where nobody answers.
    """
    identity = DeviceState(state).member()
    return CoordinatorClient(identity.url, identity.secret, patience_s=PATIENCE_S).status()


def lines(status: Status) -> list[str]:
    """The status as plain text: the round, then a line a device and one for its note."""
    head = f"round {status.round} of {status.rounds}, {status.state}"
    if status.state == "enrolling":
        members = sum(device.state != "left" for device in status.devices)
        head += f" ({have_joined(members, status.expected_devices)})"
    if status.history:
        last = status.history[-1]
        accuracy = None if last.accuracy is None else f"accuracy {last.accuracy:.1%}"
        head += f", global {accuracy or f'loss {last.loss:.4f}'}"
    return [head, *(f"  {one}" for one in status.preparing), *_rows(status.devices)]


def _rows(devices: list[DeviceStatus]) -> Iterator[str]:
    """A table of the devices, each row with its note below."""
    cells = [(_label(device), device.submodel, _doing(device)) for device in devices]
    widths = [max(map(len, column)) for column in zip(*cells, LEAST, strict=True)]
    for row, device in zip(cells, devices, strict=True):
        loss = "" if device.loss is None else f"loss {device.loss:.4f}"
        yield f"  {' '.join([*map(str.ljust, row, widths), loss])}".rstrip()
        if device.note:
            yield from wrapped("    ", device.note)


def _doing(device: DeviceStatus) -> str:
    return device.state if device.round is None else f"{device.state} round {device.round}"


def _label(device: DeviceStatus) -> str:
    """The device's id, and what its owner calls it."""
    text = device.device if device.name == device.device else f"{device.device} ({device.name})"
    return text if len(text) <= LABEL else f"{text[: LABEL - 3]}..."
