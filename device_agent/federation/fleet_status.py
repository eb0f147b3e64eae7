"""The status of the fleet, for `edgetailor-agent status`."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.federation.identity.state_folder import Identity, StateFolder
from device_agent.federation.identity.valid_secret import with_valid_secret
from device_agent.federation.release_folder import DeviceReleases
from device_agent.federation.round_log import last_lines
from device_agent.federation.spent_privacy import spent_text
from device_agent.formats.class_counts import worst_class_text
from device_agent.formats.protocol.fleet import (
    ABSENT,
    LEFT,
    DeviceStatus,
    KeyFollowed,
    Status,
    further_text,
)
from device_agent.system.clock import time_text
from profiles.errors import InputError
from profiles.text_formatting import counted, have_joined, loss_figure, round_of, visible, wrapped

PATIENCE_S = 5.0
"""How long requests are repeated if the coordinator does not answer."""
MIN_COLUMNS = ("", " " * 16, " " * 12)
"""A text for each column of the table; the column is at least as wide as its text."""
OWN_LINES = 5
LABEL_LENGTH = 27
"""The most characters of a device's id and name that are shown."""


def fleet_status(state: Path) -> Status:
    """Ask the coordinator for the status of the fleet.

    Args:
        state: State folder of a device that has joined.

    Raises:
        InputError: The device has not joined.
        ClientError: The coordinator does not answer.
    """

    def status(own: Identity) -> Status:
        return CoordinatorClient(
            own.url, own.secret, patience_s=PATIENCE_S, certificate=own.certificate
        ).status()

    return with_valid_secret(StateFolder(state).member(), status)


def own_lines(state: Path) -> list[str]:
    """The last log lines, spent privacy and release of the device with the state folder `state`."""
    log = StateFolder(state).log
    kept = last_lines(log, OWN_LINES)
    lines = [f"this device ({log}):", *(f"  {line}" for line in kept)] if kept else []
    try:
        spent = spent_text(StateFolder(state).privacy)
    except InputError as error:  # the other lines matter even more
        lines.append(str(error))
    else:
        lines += [] if spent is None else [f"the samples of this device have spent {spent}"]
    current = DeviceReleases(state).read().current
    if current is not None:
        about = f"release {current.number}, the model after round {current.round}"
        lines.append(f"this device predicts with {about}")
    return lines


def lines(status: Status) -> list[str]:
    """Format the status of the fleet in lines of text.

    The round is the first line. Then each listed device has a line. A device with a note has a
    second line.
    """
    head = f"{round_of(status.round, status.rounds)}, {status.state}"
    # Devices that have left or are absent are still listed, but their places are free.
    if status.state == "enrolling":
        members = sum(n for state, n in _states(status).items() if state not in (ABSENT, LEFT))
        head += f" ({have_joined(members, status.expected_devices)})"
    if status.history:
        current = [result for result in status.history if result.round == status.model_round]
        last = (current or status.history)[-1]
        if (judged := last.judgement()) is not None:
            accuracy = None if judged[0] is None else f"accuracy {judged[0]:.1%}"
            where = " on the devices" if last.loss is None else ""
            head += f", global {accuracy or f'loss {loss_figure(judged[1])}'}{where}"
            head += further_text(last.held_out)
        if last is not status.history[-1]:
            head += f" (back to round {last.round})"
        if (spent := status.history[-1].privacy) is not None:
            head += f", {spent.text()}"
    if status.release is not None:
        head += f", release {status.release}"
    warnings = (line for warning in status.warnings for line in wrapped("  ", warning))
    preparing = (f"  {preparation}" for preparation in status.preparing)
    selected = [] if status.selected is None else wrapped("  ", status.selected.text())
    new_key = [] if status.new_key is None else wrapped("  ", _followed(status.new_key))
    closed = counted(status.closed_connections, "connection")
    too_many = [f"  closed {closed}, because there were too many"]
    shown = [
        *(head, *selected, *_worst_class(status), *_judgement(status)),
        *(*warnings, *new_key, *preparing),
        *(too_many if status.closed_connections else []),
        *_rows(status.devices),
        *_not_listed(status),
    ]
    return [visible(line) for line in shown]


def _followed(new_key: KeyFollowed) -> str:
    """How many devices follow the coordinator's new key, and until when others can follow."""
    devices = counted(new_key.devices, "device")
    text = f"{new_key.followed:,} of {devices} follow the coordinator's new key"
    return f"{text} (possible until {time_text(new_key.until)})"


def _states(status: Status) -> Mapping[str, int]:
    """The number of devices by state."""
    return status.states or Counter(device.state for device in status.devices)


def _not_listed(status: Status) -> list[str]:
    """Lines about the devices that `status` does not list; empty if it lists all."""
    states = _states(status)
    more = sum(states.values()) - len(status.devices)
    if not more:
        return []
    all_ = ", ".join(f"{count:,} {state}" for state, count in states.items())
    text = f"and {counted(more, 'more device')} (`edgetailor devices` lists them); of all: {all_}"
    return wrapped("  ", text)


def _worst_class(status: Status) -> list[str]:
    """Lines that name the class far below the mean; empty if there is no such class."""
    current = [result for result in status.history if result.round == status.model_round]
    texts = []
    for result in current:
        if result.held_out is not None:
            texts.append(("held-out data", worst_class_text(result.held_out.classes or [])))
        if result.devices is not None:
            texts.append(("the devices", worst_class_text(result.devices.classes or [])))
    return [f"  worst class on {where}: {text}" for where, text in texts if text is not None]


def _judgement(status: Status) -> list[str]:
    """The newest judgement of the devices, in lines; empty if there is none."""
    judged = [result for result in status.history if result.devices is not None]
    if not judged or judged[-1].devices is None:
        return []
    text = f"the devices judge the model of round {judged[-1].round}: {judged[-1].devices.text()}"
    return wrapped("  ", text)


def _rows(devices: list[DeviceStatus]) -> Iterator[str]:
    """Format the devices as a table, with each note below its row."""
    cells = [(_label(device), device.submodel, _doing(device)) for device in devices]
    widths = [max(map(len, column)) for column in zip(*cells, MIN_COLUMNS, strict=True)]
    for row, device in zip(cells, devices, strict=True):
        loss = "" if device.loss is None else f"loss {loss_figure(device.loss)}"
        yield f"  {' '.join([*map(str.ljust, row, widths), loss])}".rstrip()
        if device.note:
            yield from wrapped("    ", device.note)


def _doing(device: DeviceStatus) -> str:
    doing = device.state if device.round is None else f"{device.state} round {device.round}"
    return f"{doing}, release {device.release}" if device.release else doing


def _label(device: DeviceStatus) -> str:
    """The device's id, followed by its name if the two differ."""
    text = device.device if device.name == device.device else f"{device.device} ({device.name})"
    return text if len(text) <= LABEL_LENGTH else f"{text[: LABEL_LENGTH - 3]}..."
