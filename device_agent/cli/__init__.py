"""`edgetailor-agent`: the device's command line. It parses, calls the library and prints.

Each command has a file. `console.py` is shared with the command `edgetailor`.
"""

import os

import click

from device_agent.cli.commands import Commands
from device_agent.cli.console import EXIT_CODES, run

COMMANDS = (
    "bench",
    "calibrate",
    "doctor",
    "install-service",
    "join",
    "leave",
    "profile",
    "run",
    "status",
    "train",
    "uninstall-service",
)


@click.group(
    commands=Commands(COMMANDS), epilog=EXIT_CODES, context_settings={"max_content_width": 100}
)
@click.version_option(package_name="edgetailor")
def main_group() -> None:
    """Train and profile bundles on this device, alone or in a federation.

    Alone: copy a bundle folder here, train it, and copy the update back. In a federation: join
    once, then run.
    """
    from device_agent.training.memory_limits import check_memory

    # A limit that is too low would end the process in an import, without an explanation.
    check_memory()


def main() -> None:
    """Entry point of `edgetailor-agent`."""
    # The agent multiplies no matrices with numpy, and OpenBLAS reserves 40 MB for each thread.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    run(main_group, "edgetailor-agent")
