"""Checks whether a bundle may be written to a folder.

The check does not need torch, so it can run before torch is imported.
"""

import os
from pathlib import Path

from device_agent.formats.atomic_files import check_file_place, refuse_existing
from device_agent.formats.manifest import MANIFEST
from profiles.errors import InputError


def check_bundle_place(out: Path, force: bool = False) -> None:
    """Refuse a folder to which a bundle cannot be written.

    Args:
        out: The bundle folder to be written.
        force: Allow an existing bundle or an empty folder to be replaced. Other folders are never
            replaced, because everything in them would be lost.

    Raises:
        InputError: `out` exists. With `force`: `out` exists and is not a bundle.
    """
    refuse_existing(out, force)
    if not os.path.lexists(out):
        check_file_place(out)  # for the parents, a folder has the same conditions as a file
    elif not (out / MANIFEST).is_file() and not (out.is_dir() and not any(out.iterdir())):
        raise InputError(
            "{file} is not a bundle, so --force does not replace it: give another place.",
            code="file.not-replaceable",
            file=str(out),
        )
    elif Path.cwd().is_relative_to(out.resolve()):
        raise InputError(
            "{file} cannot be replaced from inside it: go to another folder first.",
            code="file.current-folder",
            file=str(out),
        )
