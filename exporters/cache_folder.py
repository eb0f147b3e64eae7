"""The cache folder. It stores exported graphs and the costs of submodels."""

import os
from pathlib import Path

VARIABLE = "EDGETAILOR_CACHE"


def cache_folder() -> Path:
    """The folder $EDGETAILOR_CACHE, or $XDG_CACHE_HOME/edgetailor, or ~/.cache/edgetailor."""
    chosen, base = os.environ.get(VARIABLE), os.environ.get("XDG_CACHE_HOME")
    if chosen:
        return Path(chosen)
    return (Path(base) if base else Path.home() / ".cache") / "edgetailor"
