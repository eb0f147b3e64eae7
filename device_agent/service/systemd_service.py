"""The agent as a systemd service: its unit and its file of options, written and removed again."""

import logging
import os
import pwd
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from device_agent.federation.device_state import default_state
from device_agent.federation.run_options import RunOptions
from device_agent.formats.atomic_files import write_file
from profiles.errors import InputError

log = logging.getLogger(__name__)
NAME = "edgetailor-agent"
UNIT = f"{NAME}.service"
SYSTEM_UNITS = Path("/etc/systemd/system")
SYSTEM_OPTIONS = Path("/etc")
WATCHDOG_S = 900
"""Loading a graph on a small board takes minutes; a batch, a piece of a file or a wait do not."""
GROWING_RESTARTS = 254
"""The first systemd that knows RestartSteps."""
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
TEMPORARY = (Path("/tmp"), Path("/var/tmp"))
CGROUP = Path("/sys/fs/cgroup")
OLD_CGROUPS = Path("/proc/cgroups")

HARDENED = """\
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
UMask=0077
"""
HARDENED_SYSTEM = """\
CapabilityBoundingSet=
ProtectSystem=strict
ProtectHome=read-only
PrivateDevices=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectControlGroups=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
RestrictNamespaces=yes
"""
"""What only the system's manager can do for certain."""


@dataclass(frozen=True)
class Place:
    """Where a service lives: of the system, or with `user` of whoever calls."""

    user: bool
    unit: Path
    options: Path

    @property
    def systemctl(self) -> list[str]:
        """How to speak to its manager."""
        return ["systemctl", "--user"] if self.user else ["systemctl"]


def place_of(user: bool) -> Place:
    """Where the service's files go."""
    if not user:
        return Place(False, SYSTEM_UNITS / UNIT, SYSTEM_OPTIONS / f"{NAME}.toml")
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return Place(True, home / "systemd" / "user" / UNIT, home / f"{NAME}.toml")


def absolute(options: RunOptions) -> RunOptions:
    """`options` for a process that starts in another folder."""
    return replace(
        options,
        state=Path(os.path.abspath(options.state or default_state())),
        data=options.data if _is_callable(options.data) else os.path.abspath(options.data),
    )


def missing_data(options: RunOptions) -> str | None:
    """What to say where the data of `options` are not there yet."""
    if _is_callable(options.data) or Path(options.data).exists():
        return None
    return f"Note: there is nothing at {options.data} yet; the service fails until there is."


def unit_text(options: RunOptions, place: Place, version: int) -> str:
    """The unit file for a systemd of `version`. Raises InputError where `state` is not there."""
    assert options.state is not None
    folder = Path.cwd() if _is_callable(options.data) else options.state
    lines = [
        "[Unit]",
        "Description=EdgeTailor agent: trains this device's part of a federation",
        "StartLimitIntervalSec=0",
        *([] if place.user else ["Wants=network-online.target", "After=network-online.target"]),
        "",
        "[Service]",
        "Type=notify",
        f"ExecStart={_quoted(sys.executable)} -m device_agent.cli run --config "
        f"{_quoted(str(place.options))}",
        *_environment(),
        f"WorkingDirectory={_escaped(str(folder))}",
        f"WatchdogSec={WATCHDOG_S}",
        "Restart=on-failure",
        *_restarts(version),
        *([] if place.user else [f"User={_owner(options.state)}"]),
        *_memory(options.training.max_memory),
        "",
        *HARDENED.splitlines(),
        *([] if place.user else _hardened(options.state, Path(options.data))),
        "",
        "[Install]",
        f"WantedBy={'default.target' if place.user else 'multi-user.target'}",
    ]
    return "\n".join(lines) + "\n"


def install(options: RunOptions, user: bool) -> Place:
    """Write and start the service. Raises InputError, leaving nothing, where that is refused."""
    place = place_of(user)
    _check_rights(place)
    text = unit_text(options, place, systemd_version())
    try:
        # Readable by the user that the service runs as; nothing in it is secret.
        write_file(place.options, options.toml().encode())
        write_file(place.unit, text.encode())
        _systemctl(place, "daemon-reload")
        _systemctl(place, "enable", UNIT)
        _systemctl(place, "restart", UNIT)
    except (InputError, OSError):
        subprocess.run([*place.systemctl, "disable", "--now", UNIT], capture_output=True)
        _remove(place)
        raise
    log.info("Wrote %s and %s.", place.unit, place.options)
    return place


def uninstall(user: bool) -> list[Path]:
    """Stop the service and remove its files; returns which there were. Raises InputError."""
    place = place_of(user)
    there = [path for path in (place.unit, place.options) if path.exists()]
    if there:
        _check_rights(place)
        _systemctl(place, "disable", "--now", UNIT)
        _remove(place)
        _systemctl(place, "daemon-reload")
    return there


def systemd_version() -> int:
    """The version of systemd. Raises InputError where there is none."""
    try:
        done = subprocess.run(["systemctl", "--version"], capture_output=True, text=True)
    except FileNotFoundError:
        raise InputError(
            "This machine has no systemd (there is no systemctl): let its own service manager "
            "start `edgetailor-agent run`."
        ) from None
    found = re.match(r"systemd (\d+)", done.stdout)
    return int(found[1]) if found else 0


def has_memory_cgroup(cgroup: Path = CGROUP, old: Path = OLD_CGROUPS) -> bool:
    """Whether the kernel can hold a service to a memory limit; a Raspberry Pi's usually cannot."""
    try:
        return "memory" in (cgroup / "cgroup.controllers").read_text().split()
    except OSError:
        pass
    try:
        rows = [line.split() for line in old.read_text().splitlines()]
    except OSError:
        return False
    return any(row[0] == "memory" and row[-1] == "1" for row in rows)


def _hardened(state: Path, data: Path) -> list[str]:
    """What the system's manager keeps from the service, but for its own folders."""
    shared = any(path.is_relative_to(tmp) for path in (state, data) for tmp in TEMPORARY)
    return [
        *HARDENED_SYSTEM.splitlines(),
        *([] if shared else ["PrivateTmp=yes"]),
        f"ReadWritePaths={_quoted(str(state))}",
    ]


def _is_callable(data: str) -> bool:
    """Whether local data are given as module:callable, to be found from this folder."""
    return re.fullmatch(r"[\w.]+:\w+", data) is not None and not Path(data).exists()


def _environment() -> list[str]:
    """The certificates that this process trusts are those that the service must."""
    given = [(name, os.environ.get(name)) for name in CERTIFICATES]
    return [f"Environment={_quoted(f'{name}={value}')}" for name, value in given if value]


def _restarts(version: int) -> list[str]:
    if version < GROWING_RESTARTS:
        return ["RestartSec=60"]
    return ["RestartSec=10", "RestartSteps=6", "RestartMaxDelaySec=600"]


def _memory(limit: int | None) -> list[str]:
    return [f"MemoryMax={limit}"] if limit is not None and has_memory_cgroup() else []


def _owner(state: Path) -> str:
    try:
        return pwd.getpwuid(state.stat().st_uid).pw_name
    except OSError as error:
        raise InputError(
            f"The state folder {state} is not there ({error.strerror}): join first, or give the "
            "folder with --state."
        ) from None
    except KeyError:
        return str(state.stat().st_uid)


def _check_rights(place: Place) -> None:
    if not place.user and os.geteuid() != 0:
        raise InputError(
            "A service of the system is root's to change: put sudo before it and give --state "
            "DIR, or use --user for a service of your own."
        )


def _systemctl(place: Place, *arguments: str) -> None:
    if shutil.which("systemctl") is None:
        systemd_version()
    done = subprocess.run([*place.systemctl, *arguments], capture_output=True, text=True)
    if done.returncode:
        said = " ".join(done.stderr.split()).rstrip(".") or f"exit code {done.returncode}"
        command = " ".join([*place.systemctl, *arguments])
        raise InputError(
            f"`{command}` failed: {said}. Is systemd running here? --dry-run prints the unit."
        )


def _remove(place: Place) -> None:
    for path in (place.unit, place.options):
        path.unlink(missing_ok=True)


def _escaped(text: str) -> str:
    """`text` as systemd reads it back: a percent sign would begin a specifier."""
    return text.replace("%", "%%")


def _quoted(text: str) -> str:
    """One word of a list or command line."""
    inner = _escaped(text).replace("\\", "\\\\").replace('"', '\\"')
    return inner if re.fullmatch(r"[\w./:@+=-]+", text) else f'"{inner}"'
