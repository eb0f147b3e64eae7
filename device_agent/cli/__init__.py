"""`edgetailor-agent`: the device's command line. It parses, calls the library and prints.

Each command has a file. `console.py` is shared with the command `edgetailor`.
"""

import os

import click

from device_agent.cli.bench_command import bench
from device_agent.cli.calibrate_command import calibrate
from device_agent.cli.console import EXIT_CODES, run
from device_agent.cli.doctor_command import doctor
from device_agent.cli.install_service_command import install_service
from device_agent.cli.join_command import join
from device_agent.cli.leave_command import leave
from device_agent.cli.profile_command import profile
from device_agent.cli.run_command import run_command
from device_agent.cli.status_command import status
from device_agent.cli.train_command import train
from device_agent.cli.uninstall_service_command import uninstall_service
from device_agent.training.memory_limits import check_memory


@click.group(epilog=EXIT_CODES, context_settings={"max_content_width": 100})
@click.version_option(package_name="edgetailor")
def main_group() -> None:
    """Train and profile bundles on this device, alone or in a federation.

    Alone: copy a bundle folder here, train it, and copy the update back. In a federation: join
    once, then run.
    """
    # A limit that is too low would end the process in an import, without an explanation.
    check_memory()


COMMANDS = (
    bench,
    calibrate,
    doctor,
    install_service,
    join,
    leave,
    profile,
    run_command,
    status,
    train,
    uninstall_service,
)
# Each command imports what it needs when it runs, so that --help and typos are answered fast.
for command in COMMANDS:
    main_group.add_command(command)


def main() -> None:
    """Entry point of `edgetailor-agent`."""
    # The agent multiplies no matrices with numpy, and OpenBLAS reserves 40 MB for each thread.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    run(main_group, "edgetailor-agent")
