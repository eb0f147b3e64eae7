"""Reading a bundle: every file is checked before anything in it runs."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError

from device_agent.formats.atomic_files import fingerprint, fingerprint_file
from device_agent.formats.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    WEIGHTS,
    Manifest,
    TensorEntry,
    Train,
)
from device_agent.formats.manifest_validation import REPAIR, check_consistent
from device_agent.formats.tensor_files import read_tensors
from profiles.errors import BundleError
from profiles.json_decoding import decode_json


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: its folder, its manifest and the manifest's SHA-256 (the bundle's name).

    Every bundle has the signatures `predict` (samples -> output) and `evaluate` (samples, labels ->
    loss, and the number of correct samples of a classification), which `evaluate_bundle` in
    `training/bundle_evaluation.py` runs; the schedule names those that train.
    """

    folder: Path
    manifest: Manifest
    sha256: str

    def graph(self, signature: str) -> Path:
        """Path of the graph of `signature`."""
        return self.folder / self.manifest.signatures[signature].graph

    def entry(self, name: str) -> TensorEntry:
        """The table's entry of the tensor `name`."""
        return next(entry for entry in self.manifest.tensors if entry.name == name)

    def load(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """The stored tensors `names`, and only those, from the weights file."""
        try:
            tensors = read_tensors(self.folder / WEIGHTS, names)
        except SafetensorError as error:
            raise BundleError(
                f"{self.folder / WEIGHTS} cannot be read: {error}. {REPAIR}"
            ) from None
        for name, array in tensors.items():
            entry = self.entry(name)
            if array.shape != entry.shape or array.dtype.name != entry.dtype:
                raise BundleError(
                    f"{self.folder / WEIGHTS}: {name!r} is {array.dtype.name} {array.shape}, the "
                    f"manifest says {entry.dtype} {entry.shape}. {REPAIR}"
                )
        return tensors


def open_bundle(folder: Path) -> Bundle:
    """Open and check the bundle in `folder`.

    Raises BundleError naming the file that is missing, truncated or altered, or the format that
    this version does not read.
    """
    path = folder / MANIFEST
    data = manifest_bytes(folder)
    manifest = read_manifest(data, path)
    check_consistent(manifest, path)
    for name, expected in manifest.files.items():
        check_file(folder / name, expected.size, expected.sha256)
    return Bundle(folder, manifest, fingerprint(data).sha256)


def manifest_bytes(folder: Path) -> bytes:
    """What manifest.json of the bundle in `folder` holds. Raises BundleError where it has none."""
    try:
        return (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise BundleError(
            f"{folder} is no bundle: {MANIFEST} cannot be read ({error.strerror}). "
            "Give the folder that `edgetailor export --out` wrote."
        ) from None


def read_manifest(data: bytes, origin: Path | str) -> Manifest:
    """Decode a manifest. Raises BundleError for another format or a malformed one."""
    try:
        version = decode_json(data, dict[str, object]).get("version")
        if version != FORMAT_VERSION:
            raise BundleError(
                f"{origin} has format version {version}; this agent reads {FORMAT_VERSION}. "
                "Install the agent that fits the server's version."
            )
        return decode_json(data, Manifest)
    except msgspec.MsgspecError as error:
        raise BundleError(f"{origin} is not a bundle's manifest: {error}. {REPAIR}") from None


def check_file(path: Path, size: int, sha256: str) -> None:
    """Raise BundleError unless the file at `path` is the one that the manifest describes."""
    if not path.is_file():
        raise BundleError(f"{path} is missing. {REPAIR}")
    found = path.stat().st_size
    if found != size:
        how = "truncated" if found < size else "something was written behind its end"
        raise BundleError(f"{path} has {found:,} bytes instead of {size:,}: {how}. {REPAIR}")
    if fingerprint_file(path).sha256 != sha256:
        raise BundleError(f"{path} was altered: its SHA-256 is not the manifest's. {REPAIR}")


def training_of(bundle: Bundle) -> Train:
    """The training instruction of the bundle's schedule. Raises BundleError where it has none."""
    for instruction in bundle.manifest.schedule:
        if isinstance(instruction, Train):
            return instruction
    raise BundleError(f"The schedule of {bundle.folder} trains nothing.")


def structure(manifest: Manifest) -> str:
    """SHA-256 of what does not change from round to round: all ports and the tensor table."""
    ports = {name: (s.inputs, s.outputs) for name, s in manifest.signatures.items()}
    return fingerprint(msgspec.json.encode((ports, manifest.tensors), order="sorted")).sha256
