"""`edgetailor-agent run`."""

import time
from pathlib import Path

import click

from device_agent.cli.options import data_option, seed_option, state_option, threads_option
from device_agent.console import say
from device_agent.wording import counted


@click.command("run")
@data_option
@state_option
@threads_option
@seed_option
def run_command(data: str, state: Path | None, threads: int, seed: int) -> None:
    """Take part in every round until the last, waiting for the coordinator where it is away."""
    from device_agent.device import run as run_device
    from device_agent.device_state import default_state

    started = time.monotonic()

    def log(line: str) -> None:
        say(f"[{time.monotonic() - started:7.1f} s] {line}")

    taken = run_device(state or default_state(), data, log, threads=threads, seed=seed)
    click.echo(f"{counted(taken, 'update')} sent")
