"""Checks where an export may write. Needs no torch, so a command checks this first."""

import re
from pathlib import Path

from device_agent.formats.atomic_files import check_file_place
from device_agent.formats.bundle_place import check_bundle_place
from profiles.errors import InputError


def check_places(out: Path, save_weights: Path | None = None, force: bool = False) -> None:
    """Refuse paths to which the bundle or the weights cannot be written.

    A bundle's folder is replaced as a whole, so the weights file must be outside it.

    Args:
        out: The bundle folder.
        save_weights: The file for the global model; None to save no file.
        force: Whether an existing bundle and an existing weights file may be replaced.

    Raises:
        InputError: A path cannot be written to, or one path is inside the other.
    """
    check_bundle_place(out, force)
    if save_weights is None:
        return
    bundle, weights_file = out.resolve(), save_weights.resolve()
    if weights_file.is_relative_to(bundle):
        raise InputError(
            "The weights cannot be saved as {weights}, inside the bundle {out}: choose a file "
            "outside it.",
            code="export.weights-in-bundle",
            weights=str(save_weights),
            out=str(out),
        )
    if bundle.is_relative_to(weights_file):
        raise InputError(
            "The bundle cannot be written to {out}, because {weights} is the file for the weights. "
            "Give another place.",
            code="export.bundle-in-weights",
            weights=str(save_weights),
            out=str(out),
        )
    check_file_place(save_weights, force)


def folder_name(spec: str) -> str:
    """The folder for the bundle of `spec`: `low-rank:0.25,keep=3` gives low-rank-0.25-keep-3."""
    return re.sub(r"[^\w.]+", "-", spec).strip("-.")
