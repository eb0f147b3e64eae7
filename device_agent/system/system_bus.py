"""Reads the state of this machine from systemd-logind and NetworkManager with `busctl`.

A value is None if the service does not run here, or does not know the state.
"""

import shutil
import subprocess

BUSCTL = "busctl"
TIMEOUT_S = 2
IDLE = (
    "org.freedesktop.login1",
    "/org/freedesktop/login1",
    "org.freedesktop.login1.Manager",
    "IdleHint",
)
METERED = (
    "org.freedesktop.NetworkManager",
    "/org/freedesktop/NetworkManager",
    "org.freedesktop.NetworkManager",
    "Metered",
)
ANSWERS = {"u 1": True, "u 2": False, "u 3": True, "u 4": False}
"""NMMetered: 1 yes, 2 no, 3 and 4 guesses of yes and no. 0 is unknown."""


def is_readable() -> bool:
    """Whether `busctl`, a part of systemd, is installed."""
    return shutil.which(BUSCTL) is not None


def is_idle() -> bool | None:
    """Whether nobody uses this machine: all sessions of logind are idle, or there is no session."""
    return {"b true": True, "b false": False}.get(_property(IDLE))


def is_metered() -> bool | None:
    """Whether the present connection charges for data volume. NetworkManager may guess this."""
    return ANSWERS.get(_property(METERED))


def _property(place: tuple[str, str, str, str]) -> str:
    """The type and value of a property, such as `b true`; empty if it cannot be read."""
    command = [BUSCTL, "--system", f"--timeout={TIMEOUT_S}", "get-property", *place]
    try:
        asked = subprocess.run(command, capture_output=True, timeout=2 * TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout.decode(errors="replace").strip()
