"""The built-in device profiles, as a table and as JSON. Needs no torch."""

from typing import Any

from rich.console import Console

from profiles.documents.device_profile import DeviceProfile, built_in, load_device
from profiles.text_formatting import format_bytes
from toolkit.terminal_output import table

LIST_VERSION = 1


def show_profiles() -> None:
    """Print the built-in profiles as a table."""
    rows = table("profile", "device", "memory", "cores")
    rows.columns[1].justify = "left"
    for device in profiles():
        memory = "unknown" if device.memory_bytes is None else format_bytes(device.memory_bytes)
        rows.add_row(device.name, title(device), memory, str(device.cores or "unknown"))
    Console(highlight=False).print(rows)
    measured = ", ".join(profile.name for profile in profiles() if profile.calibration is not None)
    print(
        f"published figures; measured: {measured or 'none'}. A plan for a device that was not "
        "measured has no times"
    )


def profiles_as_json() -> dict[str, Any]:
    """The document that `plan --list-profiles --json` prints; null means unknown."""
    return {
        "version": LIST_VERSION,
        "profiles": [
            {
                "name": device.name,
                "title": title(device),
                "memory_bytes": device.memory_bytes,
                "cores": device.cores,
                "measured": device.calibration is not None,
            }
            for device in profiles()
        ],
    }


def profiles() -> list[DeviceProfile]:
    """The built-in profiles."""
    return [load_device(name) for name in built_in()]


def title(device: DeviceProfile) -> str:
    """The device's name for people."""
    return device.title or device.name
