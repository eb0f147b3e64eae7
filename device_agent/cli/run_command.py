"""The command `edgetailor-agent run`."""

import logging
import os
import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import click

from device_agent.cli.console import log_lines, say
from device_agent.cli.options import run_options
from device_agent.log_format import PlainFormatter
from profiles.errors import InputError
from profiles.text_formatting import counted

if TYPE_CHECKING:
    from device_agent.federation.run_options import RunOptions
    from device_agent.service.systemd_notify import Notifier

log = logging.getLogger(__name__)


def _from_file(context: click.Context, option: click.Parameter, path: Path | None) -> None:
    """Use the file's values as defaults of the other options."""
    from device_agent.federation.run_options import read_options

    if path is not None:
        context.default_map = read_options(path)


@click.command()
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    is_eager=True,
    expose_value=False,
    callback=_from_file,
    help='Read options from this TOML file, for example quiet_hours = "22:00-07:00".',
)
@run_options
def run(**given: Any) -> None:
    """Take part in every round until the last.

    While the coordinator cannot be reached, the agent waits. The owner's limits (temperature,
    battery, use, network, quiet hours) pause the agent, also in the middle of a training. During
    such a pause, no new round asks this device.
    """
    from device_agent.federation.run_options import RunOptions
    from device_agent.service.systemd_notify import Notifier

    options = RunOptions.from_flat(**given)
    signal.signal(signal.SIGTERM, _end)
    notifier = Notifier()
    # Notify before the imports, which take a minute on a small board: systemd would wait for them.
    notifier.alive()

    # `systemctl status` shows the last line of the log.
    def write(line: str) -> None:
        say(line)
        notifier.status(line)

    with log_lines(options.log_json, PlainFormatter(stamped=True), write):
        taken = _run(options, notifier)
        _say_what_is_next(options.state)
    click.echo(f"{counted(taken, 'update')} sent")


def _run(options: "RunOptions", notifier: "Notifier") -> int:
    from device_agent.federation.round_loop import run as take_part

    os.nice(options.nice)
    return take_part(options, alive=notifier.alive)


def _say_what_is_next(state: Path | None) -> None:
    """Log that the agent ends, and how the owner uses its model."""
    from device_agent.federation.newest_model import newest_model

    try:
        newest_model(state)
    except InputError:  # it has received none
        log.info("This agent ends now.")
        return
    where = "" if state is None else f" --state {state}"
    log.info(
        "This agent ends now. Predict with its model: edgetailor-agent predict --data FILE%s", where
    )


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    # systemd stops a service with SIGTERM; this is not a failure. The exception unlocks the folder.
    raise SystemExit(0)
