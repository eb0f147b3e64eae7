"""Finds a federation by its file or by its state folder, because commands take both."""

from pathlib import Path

from profiles.errors import InputError
from toolkit.coordinator.federation_file.federation_config import CoordinatorConfig
from toolkit.coordinator.federation_file.load_config import load_config
from toolkit.coordinator.storage.saved_rounds import reading

FILE = "federation_file"
"""The key in the table `meta` under which `serve` stores the path of the federation's file."""


def state_folder(federation: Path) -> Path:
    """The state folder of a federation, from its file (.toml) or from the folder itself.

    Raises InputError if the file cannot be read.
    """
    is_file = federation.is_file() or (federation.suffix == ".toml" and not federation.is_dir())
    return load_config(federation).state if is_file else federation


def check_served(federation: Path) -> None:
    """Raise InputError if `federation` is a file, but `serve` uses another file.

    A state folder is accepted, and so is a federation that `serve` has not begun yet.
    """
    if federation.is_dir():
        return
    file = _served_file(state_folder(federation))
    if file is not None and file != federation.resolve():
        raise InputError(
            "`serve` reads {file}, not {given}. Change that file, then apply it.",
            code="settings.other-file",
            file=str(file),
            given=str(federation),
        )


def load_federation(federation: Path) -> CoordinatorConfig:
    """Read the file of a federation, given this file or the state folder.

    If a state folder is given, the result has this state folder. The file may name another state
    folder, because a state folder may be moved or restored.

    Raises InputError if the file cannot be read, or if the state folder does not name a file.
    """
    if not federation.is_dir():
        return load_config(federation)
    file = _served_file(federation)
    if file is None or not file.is_file():
        where = "it is not known yet" if file is None else f"it is no longer at {file}"
        raise InputError(
            "{path} is a state folder, but its federation's file cannot be found: {where}. Give "
            "that file instead of the folder.",
            code="state.unknown-file",
            path=str(federation),
            where=where,
        )
    return load_config(file).model_copy(update={"state": federation.resolve()})


def _served_file(state: Path) -> Path | None:
    """The file that `serve` has read for the state folder `state`; None if that is not known."""
    with reading(state) as db:
        row = db.execute("SELECT value FROM meta WHERE key = ?", (FILE,)).fetchone()
    return None if row is None else Path(row[0])
