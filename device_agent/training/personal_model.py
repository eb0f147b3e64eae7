"""The file with the personal model, which stays on the device from round to round.

The file also contains the statistics of the device's last update, such as the means of batch norms.
The personal model predicts with these statistics, because the statistics of the global model would
not fit it.
"""

import hashlib
from collections.abc import Mapping
from glob import escape
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from device_agent.formats.atomic_files import write_file
from device_agent.formats.manifest import Manifest, TensorEntry
from profiles.errors import InputError

KEY = "submodel"
"""The metadata entry that identifies the submodel of the tensors."""

Personal = dict[str, np.ndarray]


def personal_entries(manifest: Manifest) -> tuple[TensorEntry, ...]:
    """The tensors of a bundle that stay on the device."""
    return tuple(entry for entry in manifest.tensors if entry.role == "personal")


def read_personal(path: Path, manifest: Manifest) -> Personal:
    """Read the personal tensors of a bundle.

    Args:
        path: The file with the tensors.
        manifest: The bundle's manifest.

    Returns:
        The tensors by name, without statistics; empty if there is no file yet.

    Raises:
        InputError: The file is damaged or belongs to another submodel.
    """
    if not path.exists():
        return {}
    names = {entry.name for entry in personal_entries(manifest)}
    return {name: a for name, a in read_personal_model(path, manifest).items() if name in names}


def read_personal_model(path: Path, manifest: Manifest) -> Personal:
    """Read the personal tensors of a bundle and the statistics with which they predict.

    A file of version 0.2 or earlier has no statistics. Raises InputError for the reasons of
    `read_personal`, and if there is no file.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            if (file.metadata() or {}).get(KEY) != _key(manifest):
                raise InputError(
                    "The personal model in {path} is not of {submodel!r}, the submodel of this "
                    "bundle. Use one file for each submodel.",
                    code="state.other-personal-model",
                    path=str(path),
                    submodel=manifest.submodel,
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return _checked(tensors, manifest)
    except (SafetensorError, OSError) as error:
        raise InputError(
            "{path} is not a readable personal model: {reason}. Give the file that an earlier "
            "round wrote, or delete it to start a new personal model.",
            code="state.unreadable-personal-model",
            path=str(path),
            reason=str(error),
        ) from None


def _checked(tensors: Personal, manifest: Manifest) -> Personal:
    """The tensors that belong to a personal model.

    Raises SafetensorError if a tensor is missing, or has another shape or type than in the
    manifest.
    """
    personal = personal_entries(manifest)
    buffers = [entry for entry in manifest.tensors if entry.role == "buffer"]
    known = {}
    for entry in (*personal, *(entry for entry in buffers if entry.name in tensors)):
        tensor = tensors.get(entry.name)
        if tensor is None or (tensor.shape, tensor.dtype.name) != (entry.shape, entry.dtype):
            raise SafetensorError(
                f"the tensor {entry.name!r} is missing, or its shape or type is wrong"
            )
        known[entry.name] = tensor
    return known


def write_personal(path: Path, tensors: Mapping[str, np.ndarray], manifest: Manifest) -> None:
    """Write the personal tensors to a file that only its owner may read.

    Args:
        path: The file. It is replaced atomically.
        tensors: The personal tensors and the statistics of the same training, by name. Without
            tensors, no file is written.
        manifest: Manifest of the bundle to which the tensors belong.
    """
    if tensors:
        # If a process was killed while it wrote, its temporary file is still there.
        for leftover in path.parent.glob(f".{escape(path.name)}.????????"):
            leftover.unlink(missing_ok=True)
        arrays = {name: np.asarray(array, order="C") for name, array in tensors.items()}
        write_file(path, save(arrays, metadata={KEY: _key(manifest)}), mode=0o600)


def _key(manifest: Manifest) -> str:
    """Hash of the submodel's name and of its personal tensors' names, types and shapes."""
    about = (manifest.submodel, personal_entries(manifest))
    return hashlib.sha256(msgspec.json.encode(about)).hexdigest()
