"""The default folder for the state of a device."""

import os
from pathlib import Path


def default_state() -> Path:
    """The default state folder, below $XDG_STATE_HOME or ~/.local/state."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "edgetailor-agent"
