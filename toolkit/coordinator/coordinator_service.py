"""`serve` as a systemd service: its unit file."""

import os
import sys
from pathlib import Path

from device_agent.service.systemd_units import (
    CERTIFICATES,
    Service,
    check_rights,
    environment,
    escaped,
    hardened,
    owner,
    quoted,
    service_of,
    wanted_by,
)
from exporters.cache_folder import VARIABLE, cache_folder
from toolkit.coordinator.federation_file.federation_config import CoordinatorConfig
from toolkit.coordinator.federation_file.load_config import load_config

NAME = "edgetailor-coordinator"
MOST_FILES = 65536
"""Each device that keeps its connection open needs a file descriptor."""
LOWEST_FREE_PORT = 1024
"""Only the system, or a service with a capability, may listen at lower ports."""


def coordinator_service(user: bool) -> Service:
    """The coordinator's service of the current user, or of the system."""
    return service_of(NAME, "edgetailor serve", user)


def unit_text(file: Path, service: Service) -> str:
    """Write the text of the unit that serves the federation of `file`.

    The service starts in the current folder, so that the module of the model is found. It runs as
    the owner of the file.

    Raises:
        InputError: The file has a mistake, or this machine has no systemd.
    """
    config, file = load_config(file), file.absolute()
    lines = [
        "[Unit]",
        "Description=EdgeTailor coordinator: runs the rounds of a federation",
        "StartLimitIntervalSec=0",
        # The address to listen at may belong to a network card that starts later.
        *([] if service.user else ["Wants=network-online.target", "After=network-online.target"]),
        "",
        "[Service]",
        "Type=exec",
        f"ExecStart={quoted(sys.executable)} -m toolkit.cli serve {quoted(str(file))}",
        *environment([*CERTIFICATES, VARIABLE, "XDG_CACHE_HOME"]),
        f"WorkingDirectory={escaped(str(Path.cwd()))}",
        "Restart=on-failure",
        "RestartSec=10",
        f"LimitNOFILE={MOST_FILES}",
        *([] if service.user else [f"User={owner(file)}"]),
        "",
        *_settings(config, service, [file, Path.cwd()]),
        "",
        *wanted_by(service),
    ]
    return "\n".join(lines) + "\n"


def install(file: Path, user: bool) -> Service:
    """Write the service's unit and start it. After an error, the unit is removed.

    Raises:
        InputError: This user may not install a service, or systemd refuses it.
    """
    service = coordinator_service(user)
    text = unit_text(file, service)
    check_rights(service)
    # systemd starts no service whose folders are missing.
    for folder in _written(load_config(file)):
        if not folder.exists():
            folder.mkdir(parents=True)
            if os.geteuid() == 0:
                there = file.stat()
                os.chown(folder, there.st_uid, there.st_gid)
    service.install(text)
    return service


def _written(config: CoordinatorConfig) -> list[Path]:
    """The folders that `serve` writes to."""
    return [config.state.absolute(), cache_folder().absolute()]


def _settings(config: CoordinatorConfig, service: Service, read: list[Path]) -> list[str]:
    """Protect the system from the service, which may still listen at its port."""
    written = _written(config)
    lines = hardened(service, [*read, *written], written)
    if config.port == 0 or config.port >= LOWEST_FREE_PORT:
        return lines
    capability = "CAP_NET_BIND_SERVICE"
    lines = [line for line in lines if not line.startswith("CapabilityBoundingSet=")]
    return [*lines, f"CapabilityBoundingSet={capability}", f"AmbientCapabilities={capability}"]
