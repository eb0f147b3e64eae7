"""Checks of this machine: state folder, disk, libraries, memory and sensors."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from device_agent.doctor.finding import Finding, isolated
from device_agent.doctor.library_checks import check_libraries, check_litert
from device_agent.system import sensors
from device_agent.training.memory_limits import ceilings
from profiles.errors import InputError
from profiles.text_formatting import format_bytes

LEAST_DISK = 200 * 10**6
"""Bytes of disk for a small model: the bundle, its update and recorded activations."""
LEAST_MEMORY = 150 * 10**6
"""Bytes of memory of the agent with a runtime and a small training step."""


def check_machine(state: Path) -> Iterator[Finding]:
    """Check everything that training needs on this machine.

    Args:
        state: The state folder.
    """
    yield from isolated("state", lambda: _writable(state))
    yield from isolated("disk", lambda: _disk(state))
    yield from isolated("libraries", check_libraries)
    yield from isolated("litert", check_litert)
    yield from isolated("memory", _memory)
    yield from isolated("temperature", _temperature)
    yield from isolated("power", _power)


def _writable(state: Path) -> Finding:
    from device_agent.federation.identity.state_folder import StateFolder

    nearest = _nearest(state)
    if not nearest.is_dir():
        return Finding.fail("state", f"{nearest} is a file", "give a folder with --state")
    if not state.exists():
        return Finding.skip("state", f"{state} does not exist yet", "`join` makes it")
    folder = StateFolder(state)
    try:
        folder.check_writable()
    except InputError as error:
        return Finding.fail(
            "state", str(error), "change its owner to the user that runs the agent: chown"
        )
    # The key is the identity of the device: whoever can read it can take part as this device.
    if folder.key.exists() and folder.key.stat().st_mode & 0o077:
        return Finding.fail(
            "state", f"other users can read {folder.key}", f"chmod 600 {folder.key}"
        )
    return Finding.ok("state", f"{state} is writable")


def _disk(state: Path) -> Finding:
    here = _nearest(state)
    free = shutil.disk_usage(here).free
    detail = f"{format_bytes(free)} free for {state}"
    if free < LEAST_DISK:
        return Finding.fail(
            "disk", detail, f"free {format_bytes(LEAST_DISK)}, or give another folder with --state"
        )
    return Finding.ok("disk", detail)


def _nearest(path: Path) -> Path:
    """`path`, or the nearest folder above it that exists."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def _memory() -> Finding:
    limits = ceilings()
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if not limits:
        least, detail = total, f"no limit below the machine's {format_bytes(total)}"
    else:
        tightest = min(limits, key=lambda ceiling: ceiling.limit)
        least, detail = tightest.limit, f"{tightest.name} is {format_bytes(tightest.limit)}"
    if least < LEAST_MEMORY:
        return Finding.fail("memory", detail, f"allow at least {format_bytes(LEAST_MEMORY)}")
    return Finding.ok("memory", detail)


def _temperature() -> Finding:
    degrees = sensors.temperature_c()
    if degrees is None:
        detail = "no sensor in /sys/class/thermal; --max-temperature cannot be used"
        return Finding.skip("temperature", detail)
    return Finding.ok("temperature", f"{degrees:.1f} °C")


def _power() -> Finding:
    charging = sensors.charging()
    if charging is None:
        detail = "no battery found; --only-when-charging never pauses"
        return Finding.skip("power", detail)
    return Finding.ok("power", "on external power" if charging else "on battery")
