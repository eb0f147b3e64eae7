"""Writes and removes the files of systemd services, and makes parts of their unit files.

The agent's service is in `systemd_service.py`. The service of `serve` is in
`toolkit/coordinator/coordinator_service.py`.
"""

import logging
import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from device_agent.formats.atomic_files import write_file
from profiles.errors import InputError
from profiles.text_formatting import one_line

log = logging.getLogger(__name__)
SYSTEM_UNITS = Path("/etc/systemd/system")
SYSTEM_OPTIONS = Path("/etc")
RESTART_STEPS_VERSION = 254
"""First version of systemd with RestartSteps."""
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
TEMPORARY = (Path("/tmp"), Path("/var/tmp"))

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
class Service:
    """The files of the service `name`. It belongs to the system or to the current user.

    Attributes:
        name: The name of its program, such as edgetailor-agent.
        start: The command that the service runs, and that people can start by hand without systemd.
        user: Whether the service belongs to the current user.
        unit: The path of its unit file.
        options: The path of a file with its options.
    """

    name: str
    start: str
    user: bool
    unit: Path
    options: Path

    @property
    def systemctl(self) -> list[str]:
        """The start of a systemctl command for this service, as a list of words."""
        return ["systemctl", "--user"] if self.user else ["systemctl"]

    def install(self, unit: str, options: bytes | None = None) -> None:
        """Write the service's files and start it. After an error, no file is left.

        Args:
            unit: The text of its unit file.
            options: The content of its options file; None if the service has no options file.

        Raises:
            InputError: This user may not install a service, or systemd refuses it.
        """
        check_rights(self)
        written = [self.unit] if options is None else [self.options, self.unit]
        try:
            if options is not None:
                # The file has no secrets, and the user of the service must be able to read it.
                write_file(self.options, options)
            write_file(self.unit, unit.encode())
            _systemctl(self, "daemon-reload")
            _systemctl(self, "enable", self.unit.name)
            _systemctl(self, "restart", self.unit.name)
        except (InputError, OSError):
            # Leave nothing half installed: a unit without options would fail at every boot.
            stop = [*self.systemctl, "disable", "--now", self.unit.name]
            subprocess.run(stop, capture_output=True)
            self._remove()
            raise
        log.info("Wrote %s.", " and ".join(map(str, reversed(written))))

    def uninstall(self) -> list[Path]:
        """Stop the service and remove its files.

        Returns:
            The files that were removed.

        Raises:
            InputError: This user may not remove the service, or systemd refuses it.
        """
        there = [path for path in (self.unit, self.options) if path.exists()]
        if there:
            check_rights(self)
            _systemctl(self, "disable", "--now", self.unit.name)
            self._remove()
            _systemctl(self, "daemon-reload")
        return there

    def _remove(self) -> None:
        for path in (self.unit, self.options):
            path.unlink(missing_ok=True)


def service_of(name: str, start: str, user: bool) -> Service:
    """The service `name` of the current user, or of the system."""
    file = f"{name}.service"
    if not user:
        return Service(name, start, False, SYSTEM_UNITS / file, SYSTEM_OPTIONS / f"{name}.toml")
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return Service(name, start, True, home / "systemd" / "user" / file, home / f"{name}.toml")


def systemd_version(start: str) -> int:
    """Find the version of systemd. `start` is the command that a service would run.

    Raises:
        InputError: This machine has no systemd.
    """
    try:
        done = subprocess.run(["systemctl", "--version"], capture_output=True, text=True)
    except FileNotFoundError:
        raise InputError(
            "This machine has no systemd (no systemctl). Start `{command}` with the machine's own "
            "service manager.",
            code="service.no-systemd",
            command=start,
        ) from None
    matched = re.match(r"systemd (\d+)", done.stdout)
    return int(matched[1]) if matched else 0


def hardened(service: Service, used: Iterable[Path], written: Iterable[Path]) -> list[str]:
    """Settings that protect the system from the service, and let the service use its own folders.

    Args:
        service: The service.
        used: All files and folders that it uses.
        written: The folders that it writes to.
    """
    if service.user:
        return HARDENED.splitlines()
    # PrivateTmp would hide files below /tmp.
    shared = any(path.is_relative_to(tmp) for path in used for tmp in TEMPORARY)
    return [
        *HARDENED.splitlines(),
        *HARDENED_SYSTEM.splitlines(),
        *([] if shared else ["PrivateTmp=yes"]),
        *(f"ReadWritePaths={quoted(str(path))}" for path in written),
    ]


def wanted_by(service: Service) -> list[str]:
    """The last section of a unit. It makes the service start with the machine or at a login."""
    target = "default.target" if service.user else "multi-user.target"
    return ["[Install]", f"WantedBy={target}"]


def environment(names: Iterable[str]) -> list[str]:
    """The settings that pass these variables of the present environment to the service."""
    given = [(name, os.environ.get(name)) for name in names]
    return [f"Environment={quoted(f'{name}={value}')}" for name, value in given if value]


def restarts(version: int) -> list[str]:
    """Settings that make systemd restart a failed service. `version` is systemd's version."""
    # Growing pauses protect a small board from a failure that repeats.
    if version < RESTART_STEPS_VERSION:
        return ["RestartSec=300"]
    return ["RestartSec=10", "RestartSteps=6", "RestartMaxDelaySec=600"]


def owner(folder: Path) -> str:
    """The name of the user who owns `folder`, or the user's number if there is no name.

    Raises OSError if `folder` does not exist.
    """
    number = folder.stat().st_uid
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def check_rights(service: Service) -> None:
    """Raise InputError unless this user may change `service`."""
    if not service.user and os.geteuid() != 0:
        raise InputError(
            "Changing a system service needs root. Use sudo, or --user for a service of the "
            "current user.",
            code="service.needs-root",
        )


def _systemctl(service: Service, *arguments: str) -> None:
    if shutil.which("systemctl") is None:
        systemd_version(service.start)
    done = subprocess.run([*service.systemctl, *arguments], capture_output=True, text=True)
    if done.returncode:
        said = one_line(done.stderr).rstrip(".") or f"exit code {done.returncode}"
        if "restart" in arguments and (journal := _journal(service)):
            said += f" (the journal: {journal})"
        command = " ".join([*service.systemctl, *arguments])
        raise InputError(
            "`{command}` failed: {reason}. Check that systemd is running; --dry-run prints the "
            "unit.",
            code="service.systemctl-failed",
            command=command,
            reason=said,
        )


def _journal(service: Service) -> str:
    """The service's last lines in the journal, which give the reason why it does not start."""
    which = ["--user-unit" if service.user else "--unit", service.unit.name]
    try:
        done = subprocess.run(
            ["journalctl", *which, "--lines=3", "--output=cat", "--no-pager", "--quiet"],
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:
        return ""
    return one_line("; ".join(done.stdout.splitlines())).rstrip(".")


def escaped(text: str) -> str:
    """Escape percent signs, which start a specifier in a unit file."""
    return text.replace("%", "%%")


def quoted(text: str) -> str:
    """Quote `text` as one word of a command line or list in a unit file."""
    inner = escaped(text).replace("\\", "\\\\").replace('"', '\\"')
    return inner if re.fullmatch(r"[\w./:@+=-]+", text) else f'"{inner}"'
