"""Writes the files of the state folder that are for people and other programs."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from device_agent.formats.atomic_files import fingerprint, fingerprint_file, write_file
from device_agent.formats.protocol.fleet import RoundResult
from toolkit.coordinator.storage.recoverable import HISTORY, MODEL

logger = logging.getLogger(__name__)

UNUSUAL = ("devices", "held_out", "changes", "limited", "staleness", "privacy")
"""Fields of a round that history.json leaves out if they are empty."""


def publish(
    folder: Path, model: bytes, results: Sequence[RoundResult], models: Mapping[int, str]
) -> None:
    """Write global.safetensors and history.json.

    If the existing global.safetensors is not in `models` (round -> SHA-256), it is renamed instead
    of replaced, because it may be newer than the database.
    """
    path, wanted = folder / MODEL, fingerprint(model).sha256
    published = fingerprint_file(path).sha256 if path.exists() else None
    if published is not None and published not in models.values():
        aside = folder / f"{path.stem}-{published[:12]}{path.suffix}"
        os.replace(path, aside)
        logger.warning("%s is not the model of a known round: moved to %s.", path, aside.name)
    if published != wanted:
        write_file(path, model)
    entries = [{**_entry(result), "model": models[result.round]} for result in results]
    document = {"version": 1, "history": entries}
    write_file(folder / HISTORY, json.dumps(document, indent=1).encode() + b"\n")


def _entry(result: RoundResult) -> dict[str, object]:
    """The fields of `result`, without those of UNUSUAL that are empty."""
    entry = asdict(result)
    return {key: value for key, value in entry.items() if value or key not in UNUSUAL}
