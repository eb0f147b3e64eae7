"""Shows the training fleet: a live table in a terminal, else a log line for each round."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from device_agent.formats.protocol.fleet import DeviceStatus, RoundResult, Status

Show = Callable[[Status], None]
logger = logging.getLogger(__name__)
STYLES = {"training": "green", "uploading": "cyan", "downloading": "cyan", "waiting": "dim"}


@contextmanager
def display(devices: Sequence[str], start: float) -> Iterator[Show]:
    """Provide a function that shows the status of the fleet.

    In a terminal, this function updates a live table; otherwise it logs lines.

    `start` is when the demo began, in seconds of `time.monotonic`.
    """
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal or console.is_dumb_terminal:
        yield Lines().show
        return
    picture = FleetTable(devices, start)
    with Live(picture, console=console, transient=True):
        yield picture.show


class Lines:
    """Logs the progress of the fleet.

    Before the first round it logs the number of kinds of device whose graphs are exported. Then it
    logs a line for each finished round.
    """

    def __init__(self) -> None:
        self._told = 0
        self._ready = 0

    def show(self, status: Status) -> None:
        """Log what is new in `status`."""
        for result in status.history[self._told :]:
            logger.info(round_line(result, status.rounds))
        # The first round starts when the last graph is ready, perhaps before the next poll.
        ready = status.kinds if status.round else status.kinds_ready
        if ready > self._ready:
            logger.info(graphs(ready, status.kinds))
            self._ready = ready
        self._told = len(status.history)


class FleetTable:
    """The round, the elapsed time and a row for each device, in the order of `devices`."""

    def __init__(self, devices: Sequence[str], start: float) -> None:
        self._devices, self._start = devices, start
        self._status: Status | None = None

    def show(self, status: Status) -> None:
        """Show `status` from now on."""
        self._status = status

    def __rich__(self) -> Group:
        elapsed = f"{time.monotonic() - self._start:.0f} s"
        if self._status is None:
            return Group(Text(f"Waiting for the coordinator · {elapsed}"))
        head = Text.assemble((stage(self._status), "bold"), f" · {elapsed}", accuracy(self._status))
        return Group(head, Text(), self._table(self._status))

    def _table(self, status: Status) -> Table:
        known = {device.name: device for device in status.devices}
        table = Table("device", "submodel", "state", box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("loss", justify="right")
        for name in self._devices:
            table.add_row(*row(name, known.get(name)))
        return table


def round_line(result: RoundResult, rounds: int) -> str:
    """A finished round as a line of text."""
    head = f"Round {result.round} of {rounds}" if result.round else "Before training"
    return f"{head}: accuracy {result.accuracy:.1%}, loss {result.loss:.4f}"


def stage(status: Status) -> str:
    """The current stage of the fleet."""
    if status.state == "finished":
        return f"All {status.rounds} rounds are over"
    if status.round == 0:
        there = f"{len(status.devices)} of {status.expected_devices} devices"
        return f"{graphs(status.kinds_ready, status.kinds)}, {there}"
    return f"Round {status.round} of {status.rounds}, {status.state}"


def graphs(ready: int, kinds: int) -> str:
    """A line with the number of `kinds` whose training graphs are exported."""
    return f"Making graphs of training steps, {ready} of {kinds} kinds"


def accuracy(status: Status) -> str:
    """The global model's accuracy after the last finished round; empty before that."""
    return f" · global accuracy {status.history[-1].accuracy:.1%}" if status.history else ""


def row(name: str, device: DeviceStatus | None) -> tuple[Text, ...]:
    """The row of a device. A device that has not joined yet has only a name."""
    if device is None:
        return Text(name), Text(""), Text("starting", style="dim"), Text("")
    loss = "" if device.loss is None else f"{device.loss:.4f}"
    state = Text(device.state, style=STYLES.get(device.state, ""))
    return Text(name), Text(device.submodel), state, Text(loss)
