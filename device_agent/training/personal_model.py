"""The personal model in a file of its own, which stays on the device from round to round."""

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
"""Where the file says which submodel its tensors belong to."""

Personal = dict[str, np.ndarray]


def personal_entries(manifest: Manifest) -> tuple[TensorEntry, ...]:
    """The tensors of a bundle that stay on the device."""
    return tuple(entry for entry in manifest.tensors if entry.role == "personal")


def read_personal(path: Path, manifest: Manifest) -> Personal:
    """The personal tensors in the file `path`; none where there is no file yet.

    Raises InputError for a damaged file and for one of another submodel.
    """
    if not path.exists():
        return {}
    try:
        with safe_open(path, framework="numpy") as file:
            if (file.metadata() or {}).get(KEY) != _key(manifest):
                raise InputError(
                    f"{path} is no personal model of {manifest.submodel!r} as this bundle has it: "
                    "give each submodel a file of its own."
                )
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{path} is no readable personal model: {error}. Give the file that an earlier round "
            "wrote, or remove it to begin a new one."
        ) from None


def write_personal(path: Path, tensors: Mapping[str, np.ndarray], manifest: Manifest) -> None:
    """Keep `tensors` in the file `path`, which only the owner may read; none, no file.

    What a process that was killed at this left of its own goes.
    """
    if tensors:
        for half in path.parent.glob(f".{escape(path.name)}.????????"):
            half.unlink(missing_ok=True)
        arrays = {name: np.asarray(array, order="C") for name, array in tensors.items()}
        write_file(path, save(arrays, metadata={KEY: _key(manifest)}), mode=0o600)


def _key(manifest: Manifest) -> str:
    """Fingerprint of the submodel and of the personal tensors that it has."""
    about = (manifest.submodel, personal_entries(manifest))
    return hashlib.sha256(msgspec.json.encode(about)).hexdigest()
