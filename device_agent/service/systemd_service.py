"""The agent's systemd service: its unit and its options file."""

import os
import re
import sys
from dataclasses import replace
from pathlib import Path

from device_agent.federation.default_state import default_state
from device_agent.federation.run_options import RunOptions
from device_agent.service.systemd_units import (
    CERTIFICATES,
    Service,
    check_rights,
    environment,
    escaped,
    hardened,
    owner,
    quoted,
    restarts,
    service_of,
    systemd_version,
    wanted_by,
)
from profiles.errors import InputError

NAME = "edgetailor-agent"
WATCHDOG_S = 900
"""systemd restarts the agent if it reports no progress for this time. The agent reports after each
batch, each piece of a file and before each wait. Only its start and loading a graph take longer:
minutes on a small board."""
CGROUP = Path("/sys/fs/cgroup")
OLD_CGROUPS = Path("/proc/cgroups")


def agent_service(user: bool) -> Service:
    """The agent's service, which belongs to the current user or to the system."""
    return service_of(NAME, "edgetailor-agent run", user)


def with_absolute_paths(options: RunOptions) -> RunOptions:
    """Make the paths in `options` absolute, because the service starts in another folder."""
    return replace(
        options,
        state=Path(os.path.abspath(options.state or default_state())),
        data=options.data if _is_callable(options.data) else os.path.abspath(options.data),
    )


def missing_data_note(options: RunOptions) -> str | None:
    """The note for the user if the data of `options` do not exist yet."""
    if _is_callable(options.data) or Path(options.data).exists():
        return None
    return f"Note: {options.data} does not exist yet. The service fails until it does."


def unit_text(options: RunOptions, service: Service, version: int) -> str:
    """Write the text of the unit file.

    Args:
        options: The agent's options, with absolute paths.
        service: The agent's service.
        version: Version of systemd.

    Raises:
        InputError: The state folder does not exist.
    """
    assert options.state is not None
    # A function is imported from the folder in which `install-service` ran.
    folder = Path.cwd() if _is_callable(options.data) else options.state
    lines = [
        "[Unit]",
        "Description=EdgeTailor agent: trains this device's part of a federation",
        # Do not limit the number of starts: the data may appear a day later, and the agent must
        # start then.
        "StartLimitIntervalSec=0",
        # The agent itself waits for its coordinator. Waiting for a network would delay the boot.
        *([] if service.user else ["After=network.target"]),
        "",
        "[Service]",
        # With `exec` the service counts as started when the program runs. With `notify`, systemd
        # would wait for Python and delay the boot. On a small board it would end the agent after 90
        # seconds.
        "Type=exec",
        "NotifyAccess=main",
        f"ExecStart={quoted(sys.executable)} -m device_agent.cli run --config "
        f"{quoted(str(service.options))}",
        *environment(CERTIFICATES),
        f"WorkingDirectory={escaped(str(folder))}",
        f"WatchdogSec={WATCHDOG_S}",
        "Restart=on-failure",
        *restarts(version),
        *([] if service.user else [f"User={_owner(options.state)}"]),
        *_memory(options.training.max_memory),
        "",
        *hardened(service, [options.state, Path(options.data)], [options.state]),
        "",
        *wanted_by(service),
    ]
    return "\n".join(lines) + "\n"


def install(options: RunOptions, user: bool) -> Service:
    """Write the service's files and start it. After an error, no file is left.

    Raises:
        InputError: This user may not install a service, or systemd refuses it.
    """
    service = agent_service(user)
    check_rights(service)
    text = unit_text(options, service, systemd_version(service.start))
    service.install(text, options.toml().encode())
    return service


def has_memory_cgroup(cgroup: Path = CGROUP, old: Path = OLD_CGROUPS) -> bool:
    """Whether the kernel can limit a service's memory. Most Raspberry Pi kernels cannot."""
    try:
        return "memory" in (cgroup / "cgroup.controllers").read_text().split()
    except OSError:
        pass
    try:
        rows = [line.split() for line in old.read_text().splitlines()]
    except OSError:
        return False
    return any(row[0] == "memory" and row[-1] == "1" for row in rows)


def _is_callable(data: str) -> bool:
    """Whether the data are `module:callable`, which is imported from the current folder."""
    return re.fullmatch(r"[\w.]+:\w+", data) is not None and not Path(data).exists()


def _memory(limit: int | None) -> list[str]:
    return [f"MemoryMax={limit}"] if limit is not None and has_memory_cgroup() else []


def _owner(state: Path) -> str:
    try:
        return owner(state)
    except OSError as error:
        raise InputError(
            "The state folder {path} cannot be found ({reason}). Join first, or give the folder "
            "with --state.",
            code="state.no-folder",
            path=str(state),
            reason=error.strerror,
        ) from None
