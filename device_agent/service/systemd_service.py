"""Installs and removes the agent's systemd service: its unit and its options file."""

import logging
import os
import pwd
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from device_agent.federation.default_state import default_state
from device_agent.federation.run_options import RunOptions
from device_agent.formats.atomic_files import write_file
from profiles.errors import InputError
from profiles.text_formatting import one_line

log = logging.getLogger(__name__)
NAME = "edgetailor-agent"
UNIT = f"{NAME}.service"
SYSTEM_UNITS = Path("/etc/systemd/system")
SYSTEM_OPTIONS = Path("/etc")
WATCHDOG_S = 900
"""systemd restarts the agent if it reports no progress for this time. The agent reports after each
batch, each piece of a file and before each wait. Only its start and loading a graph take longer:
minutes on a small board."""
RESTART_STEPS_VERSION = 254
"""First version of systemd with RestartSteps."""
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
"""Settings that need privileges. On some machines only the system's service manager has them."""


@dataclass(frozen=True)
class ServicePlace:
    """The paths of a service's files. The service belongs to the system or to the current user."""

    user: bool
    unit: Path
    options: Path

    @property
    def systemctl(self) -> list[str]:
        """How to call systemctl for this service, as a list of words."""
        return ["systemctl", "--user"] if self.user else ["systemctl"]


def service_place(user: bool) -> ServicePlace:
    """The paths of the service's files."""
    if not user:
        return ServicePlace(False, SYSTEM_UNITS / UNIT, SYSTEM_OPTIONS / f"{NAME}.toml")
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return ServicePlace(True, home / "systemd" / "user" / UNIT, home / f"{NAME}.toml")


def with_absolute_paths(options: RunOptions) -> RunOptions:
    """Make the paths of `options` absolute, because the service starts in another folder."""
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


def unit_text(options: RunOptions, files: ServicePlace, version: int) -> str:
    """Write the text of the unit file.

    Args:
        options: The agent's options, with absolute paths.
        files: The paths of the unit and the options file.
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
        # No limit of starts: the data may appear a day later, and then the agent must start.
        "StartLimitIntervalSec=0",
        # The agent itself waits for its coordinator. Waiting for a network would delay the boot.
        *([] if files.user else ["After=network.target"]),
        "",
        "[Service]",
        # With `exec` the service counts as started when the program runs. With `notify`, systemd
        # would wait for Python, delay the boot, and end it after 90 s on a small board.
        "Type=exec",
        "NotifyAccess=main",
        f"ExecStart={_quoted(sys.executable)} -m device_agent.cli run --config "
        f"{_quoted(str(files.options))}",
        *_environment(),
        f"WorkingDirectory={_escaped(str(folder))}",
        f"WatchdogSec={WATCHDOG_S}",
        "Restart=on-failure",
        *_restarts(version),
        *([] if files.user else [f"User={_owner(options.state)}"]),
        *_memory(options.training.max_memory),
        "",
        *HARDENED.splitlines(),
        *([] if files.user else _hardened(options.state, Path(options.data))),
        "",
        "[Install]",
        f"WantedBy={'default.target' if files.user else 'multi-user.target'}",
    ]
    return "\n".join(lines) + "\n"


def install(options: RunOptions, user: bool) -> ServicePlace:
    """Write the service's files and start it. After an error, no file is left.

    Raises:
        InputError: This user may not install a service, or systemd refuses it.
    """
    files = service_place(user)
    _check_rights(files)
    text = unit_text(options, files, systemd_version())
    try:
        # The file has no secrets, and the user of the service must be able to read it.
        write_file(files.options, options.toml().encode())
        write_file(files.unit, text.encode())
        _systemctl(files, "daemon-reload")
        _systemctl(files, "enable", UNIT)
        _systemctl(files, "restart", UNIT)
    except (InputError, OSError):
        # Leave nothing half installed: a unit without options would fail at every boot.
        subprocess.run([*files.systemctl, "disable", "--now", UNIT], capture_output=True)
        _remove(files)
        raise
    log.info("Wrote %s and %s.", files.unit, files.options)
    return files


def uninstall(user: bool) -> list[Path]:
    """Stop the service and remove its files.

    Returns:
        The files that were removed.

    Raises:
        InputError: This user may not remove the service, or systemd refuses it.
    """
    files = service_place(user)
    there = [path for path in (files.unit, files.options) if path.exists()]
    if there:
        _check_rights(files)
        _systemctl(files, "disable", "--now", UNIT)
        _remove(files)
        _systemctl(files, "daemon-reload")
    return there


def systemd_version() -> int:
    """Find the version of systemd.

    Raises:
        InputError: This machine has no systemd.
    """
    try:
        done = subprocess.run(["systemctl", "--version"], capture_output=True, text=True)
    except FileNotFoundError:
        raise InputError(
            "This machine has no systemd (no systemctl). Start `edgetailor-agent run` with the "
            "machine's own service manager.",
            code="service.no-systemd",
        ) from None
    matched = re.match(r"systemd (\d+)", done.stdout)
    return int(matched[1]) if matched else 0


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


def _hardened(state: Path, data: Path) -> list[str]:
    """Settings that protect the system from the service, but let it use its own folders."""
    # PrivateTmp would hide a state folder or data below /tmp.
    shared = any(path.is_relative_to(tmp) for path in (state, data) for tmp in TEMPORARY)
    return [
        *HARDENED_SYSTEM.splitlines(),
        *([] if shared else ["PrivateTmp=yes"]),
        f"ReadWritePaths={_quoted(str(state))}",
    ]


def _is_callable(data: str) -> bool:
    """Whether the data are `module:callable`, which is imported from the current folder."""
    return re.fullmatch(r"[\w.]+:\w+", data) is not None and not Path(data).exists()


def _environment() -> list[str]:
    """Let the service trust the certificates that this process trusts."""
    given = [(name, os.environ.get(name)) for name in CERTIFICATES]
    return [f"Environment={_quoted(f'{name}={value}')}" for name, value in given if value]


def _restarts(version: int) -> list[str]:
    # Growing pauses protect a small board from a failure that repeats.
    if version < RESTART_STEPS_VERSION:
        return ["RestartSec=300"]
    return ["RestartSec=10", "RestartSteps=6", "RestartMaxDelaySec=600"]


def _memory(limit: int | None) -> list[str]:
    return [f"MemoryMax={limit}"] if limit is not None and has_memory_cgroup() else []


def _owner(state: Path) -> str:
    try:
        return pwd.getpwuid(state.stat().st_uid).pw_name
    except OSError as error:
        raise InputError(
            "The state folder {path} cannot be found ({reason}). Join first, or give the folder "
            "with --state.",
            code="state.no-folder",
            path=str(state),
            reason=error.strerror,
        ) from None
    except KeyError:
        return str(state.stat().st_uid)


def _check_rights(files: ServicePlace) -> None:
    if not files.user and os.geteuid() != 0:
        raise InputError(
            "Changing a system service needs root. Use sudo with --state DIR, or --user for a "
            "service of the current user.",
            code="service.needs-root",
        )


def _systemctl(files: ServicePlace, *arguments: str) -> None:
    if shutil.which("systemctl") is None:
        systemd_version()
    done = subprocess.run([*files.systemctl, *arguments], capture_output=True, text=True)
    if done.returncode:
        said = one_line(done.stderr).rstrip(".") or f"exit code {done.returncode}"
        if "restart" in arguments and (journal := _journal(files)):
            said += f" (the journal: {journal})"
        command = " ".join([*files.systemctl, *arguments])
        raise InputError(
            "`{command}` failed: {reason}. Check that systemd is running; --dry-run prints the "
            "unit.",
            code="service.systemctl-failed",
            command=command,
            reason=said,
        )


def _journal(files: ServicePlace) -> str:
    """The service's last lines in the journal, which give the reason why it does not start."""
    which = ["--user-unit" if files.user else "--unit", UNIT]
    try:
        done = subprocess.run(
            ["journalctl", *which, "--lines=3", "--output=cat", "--no-pager", "--quiet"],
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:
        return ""
    return one_line("; ".join(done.stdout.splitlines())).rstrip(".")


def _remove(files: ServicePlace) -> None:
    for path in (files.unit, files.options):
        path.unlink(missing_ok=True)


def _escaped(text: str) -> str:
    """Escape percent signs, which start a specifier in a unit file."""
    return text.replace("%", "%%")


def _quoted(text: str) -> str:
    """Quote `text` as one word of a command line or list in a unit file."""
    inner = _escaped(text).replace("\\", "\\\\").replace('"', '\\"')
    return inner if re.fullmatch(r"[\w./:@+=-]+", text) else f'"{inner}"'
