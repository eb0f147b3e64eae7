"""Checks a state folder before it is served. The check changes nothing.

A missing or damaged file is accepted only if it can be restored from other files. Otherwise the
folder is refused. A new federation never begins in the folder of an earlier federation.
"""

import logging
from pathlib import Path

from profiles.errors import InputError
from toolkit.coordinator.storage.database_check import check_database
from toolkit.coordinator.storage.federation_marker import MARKER, Marker, read_marker
from toolkit.coordinator.storage.recoverable import (
    FILES,
    HISTORY,
    MODEL,
    has_hash,
    recoverable,
)
from toolkit.coordinator.storage.release_folder import ReleaseFolder

logger = logging.getLogger(__name__)

DATABASE = "state.sqlite3"
CONTENTS = "backup.json"
"""The file that makes a folder a backup."""
WRITTEN_LATER = (MARKER, MODEL, HISTORY, "address")
"""Files that `serve` writes only after the database exists."""


def check_folder(folder: Path, needs_model: bool = True) -> None:
    """Check the state folder `folder`, which no process may be using.

    `needs_model`: the model that the next round starts from must exist.

    Raises:
        InputError: If the folder has a federation that cannot be continued or that has another
            version, or if releases.json is damaged.
    """
    if (folder / CONTENTS).exists():
        raise InputError(
            "{path} is a backup, which must not change: create a state folder from it "
            "(`edgetailor restore`).",
            code="state.is-backup",
            path=str(folder),
        )
    expected, marker = check_database(folder / DATABASE), read_marker(folder)
    ReleaseFolder(folder).read()
    if expected is None:
        _check_new(folder)
        return
    if marker is None and (folder / MARKER).exists():
        logger.warning("%s is damaged. It is written again.", folder / MARKER)
    if marker is not None:
        _check_not_older(folder, expected, marker)
    if (
        needs_model
        and expected.model is not None
        and not any(
            has_hash(path, expected.model)
            for path in (folder / FILES / expected.model, folder / MODEL)
        )
    ):
        raise InputError(
            "{path}, the model of round {round}, is missing or damaged, and {model} is not a copy "
            "of it. Nothing was changed. Put a copy back, or go back to another round (`edgetailor "
            "rounds`, `edgetailor rollback`). {remedy}",
            code="state.damaged-model",
            path=str(folder / FILES / expected.model),
            round=expected.round,
            model=MODEL,
            remedy=recoverable(folder),
        )


def _check_new(folder: Path) -> None:
    """Raise InputError unless a new federation may begin in `folder`."""
    files = folder / FILES
    left = [name for name in WRITTEN_LATER if (folder / name).exists()]
    if files.is_dir() and any(files.iterdir()):
        left.append(FILES)
    if left:
        raise InputError(
            "{path} contained a federation (it still has {left}), but {database} is missing or "
            "empty. Nothing was changed. {remedy}",
            code="state.no-database",
            path=str(folder),
            left=", ".join(left),
            database=DATABASE,
            remedy=recoverable(folder),
        )


def _check_not_older(folder: Path, database: Marker, marker: Marker) -> None:
    if database.id != marker.id:
        raise InputError(
            "{database} and the other files of the folder ({marker}) belong to different "
            "federations. Nothing was changed. Put the right database back, or set another "
            "`state` folder.",
            code="state.other-database",
            path=str(folder),
            database=folder / DATABASE,
            marker=MARKER,
        )
    if database.generation < marker.generation:
        raise InputError(
            "{database} is older than the other files of the folder. Its last round is {round}, "
            "and {marker} says {expected_round}; if these are equal, devices have joined or left "
            "since. Nothing was changed. Put the newer database back. To continue with the old "
            "one, remove {marker}: later rounds and devices that joined later are then lost. "
            "{remedy}",
            code="state.older-database",
            path=str(folder),
            round=database.round,
            expected_round=marker.round,
            database=folder / DATABASE,
            marker=MARKER,
            remedy=recoverable(folder),
        )
