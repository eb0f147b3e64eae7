"""Describes what can be recovered from a state folder that cannot be served."""

import json
from collections.abc import Iterator
from pathlib import Path

from device_agent.formats.atomic_files import fingerprint_file

FILES = "files"
MODEL = "global.safetensors"
HISTORY = "history.json"


def recoverable(folder: Path) -> str:
    """Sentences for people: the newest model that `folder` still has, and what to do."""
    path = next(_models(folder), None)
    if path is None:
        return (
            "No model is left in the folder. Restore a backup (`edgetailor restore`), or set "
            "another `state` folder."
        )
    return (
        f"Restore a backup (`edgetailor restore`); or set another `state` folder and `weights` to "
        f"a copy of {path}, the newest model that is left, to begin again from it."
    )


def _models(folder: Path) -> Iterator[Path]:
    """The models whose hash history.json knows, the newest first; then global.safetensors."""
    try:
        history = json.loads((folder / HISTORY).read_bytes())["history"]
        known = [str(entry["model"]) for entry in reversed(history)]
    except (OSError, ValueError, KeyError, TypeError):
        known = []
    for sha256 in known:
        for path in (folder / FILES / sha256, folder / MODEL):
            if has_hash(path, sha256):
                yield path
    if not known and (folder / MODEL).is_file():
        yield folder / MODEL


def has_hash(path: Path, sha256: str) -> bool:
    """Whether the file at `path` exists and has this SHA-256."""
    try:
        return fingerprint_file(path).sha256 == sha256
    except OSError:
        return False
