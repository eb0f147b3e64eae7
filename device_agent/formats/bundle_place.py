"""Checks whether a bundle may be written to a folder.

The check does not need torch, so commands run it before they import torch.
"""

import json
import os
from contextlib import suppress
from pathlib import Path

from device_agent.formats.atomic_files import check_file_place, refuse_existing
from device_agent.formats.manifest import CARD, CARD_SIGNATURE, CARD_TEXT, MANIFEST
from profiles.errors import InputError


def check_bundle_place(out: Path, force: bool = False) -> None:
    """Raise an error for a folder to which a bundle cannot be written.

    Args:
        out: The bundle folder to be written.
        force: Allow an existing bundle or an empty folder to be replaced. A folder with other files
            is never replaced, because these files would be lost.

    Raises:
        InputError: `out` exists, but `force` is not set. Or `out` contains files that are not part
            of a bundle.
    """
    refuse_existing(out, force)
    if not os.path.lexists(out):
        check_file_place(out)  # its parents must meet the same conditions as those of a file
        return
    if not (out / MANIFEST).is_file() and not (out.is_dir() and not any(out.iterdir())):
        problem = "is not a bundle"
    elif Path.cwd().is_relative_to(out.resolve()):
        raise InputError(
            "{file} cannot be replaced, because the current folder is inside it: go to another "
            "folder first.",
            code="file.current-folder",
            file=str(out),
        )
    elif (other := foreign_file(out)) is not None:
        problem = f"has more than a bundle: {other}"
    else:
        return
    raise InputError(
        "{file} {problem}, so --force does not replace it: give another place.",
        code="file.not-replaceable",
        file=str(out),
        problem=problem,
    )


def foreign_file(folder: Path) -> str | None:
    """Find a file in `folder` that is not part of a bundle. Returns None if there is no such file.

    The manifest may have another version. If the manifest is damaged, graphs and weights do not
    count as part of the bundle.
    """
    known: set[str] = set()
    with suppress(OSError, ValueError, LookupError, TypeError):
        content = (folder / MANIFEST).read_bytes()
        known = {MANIFEST, CARD, CARD_TEXT, CARD_SIGNATURE}
        known |= set(json.loads(content)["files"])
    return next((path.name for path in sorted(folder.iterdir()) if path.name not in known), None)
