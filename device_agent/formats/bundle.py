"""Reads bundles. Every file is checked before anything in it runs."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError

from device_agent.formats.atomic_files import fingerprint, fingerprint_file
from device_agent.formats.graph_forms import form_of
from device_agent.formats.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    WEIGHTS,
    Manifest,
    Port,
    TensorEntry,
    Train,
)
from device_agent.formats.manifest_validation import REPAIR, check_consistent
from device_agent.formats.tensor_files import read_tensors
from profiles.errors import BundleError
from profiles.json_decoding import decode_json


@dataclass(frozen=True)
class Bundle:
    """An opened and checked bundle.

    Every bundle has the signatures `predict` (samples -> output) and `evaluate` (samples, labels ->
    loss). For a classification, `evaluate` also returns the number of correct predictions. The
    schedule lists the signatures for training.

    Attributes:
        folder: The folder of the bundle.
        manifest: The decoded manifest.
        sha256: SHA-256 of the manifest file. It identifies the bundle.
    """

    folder: Path
    manifest: Manifest
    sha256: str

    def graph(self, signature: str) -> Path:
        """The path of the file with the graph of `signature`."""
        return self.folder / self.manifest.signatures[signature].graph

    def entry(self, name: str) -> TensorEntry:
        """The entry of the tensor `name` in the tensor table."""
        return next(entry for entry in self.manifest.tensors if entry.name == name)

    def load(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Read the stored tensors `names` from the weights file.

        Raises:
            BundleError: The file cannot be read, or a tensor differs from the manifest.
        """
        try:
            tensors = read_tensors(self.folder / WEIGHTS, names)
        except SafetensorError as error:
            raise BundleError(
                "{path} cannot be read: {reason}. {repair}",
                code="bundle.unreadable-weights",
                file=WEIGHTS,
                path=self.folder / WEIGHTS,
                reason=str(error),
                repair=REPAIR,
            ) from None
        # The hash of the file matches the manifest, but the manifest may describe other tensors.
        for name, array in tensors.items():
            entry = self.entry(name)
            if array.shape != entry.shape or array.dtype.name != entry.dtype:
                raise BundleError(
                    "{path}: {tensor!r} is {found_dtype} {found_shape}, but the manifest says "
                    "{expected_dtype} {expected_shape}. {repair}",
                    code="bundle.wrong-tensor",
                    tensor=name,
                    path=self.folder / WEIGHTS,
                    found_dtype=array.dtype.name,
                    found_shape=array.shape,
                    expected_dtype=entry.dtype,
                    expected_shape=entry.shape,
                    repair=REPAIR,
                )
        return tensors


def open_bundle(folder: Path) -> Bundle:
    """Open and check the bundle in `folder`.

    Raises:
        BundleError: A file is missing, truncated or altered. Or the manifest contradicts itself or
            lacks a form of a graph. Or this version does not read the format.
    """
    path = folder / MANIFEST
    data = manifest_bytes(folder)
    manifest = read_manifest(data, path)
    # Check this first, because it refuses file names that lead out of the folder.
    check_consistent(manifest, path)
    for name, expected in manifest.files.items():
        if form_of(name) is not None and not (folder / name).exists():
            continue  # a form of a graph for other devices
        check_file(folder / name, expected.size, expected.sha256)
    # A device runs the form of its runtime if the folder has it.
    for file in sorted(folder.iterdir()):
        if form_of(file.name) is not None and file.name not in manifest.files:
            raise BundleError(
                "{path} is not a file of this bundle. It may be left from an earlier bundle in the "
                "folder. Delete it.",
                code="bundle.foreign-file",
                file=file.name,
                path=file,
            )
    return Bundle(folder, manifest, fingerprint(data).sha256)


def manifest_bytes(folder: Path) -> bytes:
    """The content of manifest.json in `folder`. Raises BundleError if it cannot be read."""
    try:
        return (folder / MANIFEST).read_bytes()
    except OSError as error:
        inside = sorted(path.parent.name for path in folder.glob(f"*/{MANIFEST}"))
        raise BundleError(
            "{folder} is not a bundle: {manifest} cannot be read ({reason}). {remedy}",
            code="bundle.not-a-bundle",
            folder=str(folder),
            manifest=MANIFEST,
            reason=error.strerror,
            bundles=inside,
            remedy=f"It has the bundles {', '.join(inside)}: give one of them, such as "
            f"{folder / inside[0]}."
            if inside
            else "Give a folder that `edgetailor export` or `edgetailor deploy` wrote.",
        ) from None


def read_manifest(data: bytes, origin: Path | str) -> Manifest:
    """Decode a manifest. Raises BundleError if it is malformed or has another format version."""
    try:
        # Read the version first: another version may have fields that this version refuses.
        version = decode_json(data, dict[str, object]).get("version")
        if version != FORMAT_VERSION:
            raise BundleError(
                "{origin} has format version {version}; this agent reads {supported}. Install the "
                "version of the agent that matches the server.",
                code="bundle.wrong-version",
                found=version if isinstance(version, int) else None,
                supported=FORMAT_VERSION,
                origin=origin,
                version=version,
            )
        return decode_json(data, Manifest)
    except msgspec.MsgspecError as error:
        raise BundleError(
            "{origin} is not a bundle's manifest: {reason}. {repair}",
            code="bundle.malformed-manifest",
            origin=origin,
            reason=str(error),
            repair=REPAIR,
        ) from None


def check_file(path: Path, size: int, sha256: str) -> None:
    """Raise BundleError unless the file at `path` has this size in bytes and this SHA-256."""
    if not path.is_file():
        raise BundleError(
            "{path} is missing. {repair}",
            code="bundle.missing-file",
            file=path.name,
            path=path,
            repair=REPAIR,
        )
    # Compare sizes first: it is fast, and a truncated copy gets a more useful message.
    actual = path.stat().st_size
    if actual != size:
        how = "it was truncated" if actual < size else "something was appended to it"
        raise BundleError(
            "{path} has {found_bytes:,} bytes instead of {expected_bytes:,}: {reason}. {repair}",
            code="bundle.wrong-size",
            file=path.name,
            found_bytes=actual,
            expected_bytes=size,
            path=path,
            reason=how,
            repair=REPAIR,
        )
    if fingerprint_file(path).sha256 != sha256:
        raise BundleError(
            "{path} was altered: its SHA-256 differs from the manifest. {repair}",
            code="bundle.altered-file",
            file=path.name,
            path=path,
            repair=REPAIR,
        )


def training_of(bundle: Bundle) -> Train:
    """The training instruction of the schedule. Raises BundleError if there is none."""
    for instruction in bundle.manifest.schedule:
        if isinstance(instruction, Train):
            return instruction
    raise BundleError(
        "{folder} cannot be trained: it is an inference bundle, which only predicts. Give a bundle "
        "that `edgetailor export` wrote.",
        code="bundle.no-training",
        folder=str(bundle.folder),
    )


def structure(manifest: Manifest) -> str:
    """The SHA-256 of all ports and of the tensor table. It stays the same in every round.

    The web page for phones computes the same hash. The hash does not cover the ranges of random
    samples, because JavaScript writes these numbers differently.
    """

    def plain(ports: Iterable[Port]) -> list[Port]:
        return [msgspec.structs.replace(port, range=msgspec.UNSET) for port in ports]

    ports = {name: (plain(s.inputs), plain(s.outputs)) for name, s in manifest.signatures.items()}
    return fingerprint(msgspec.json.encode((ports, manifest.tensors), order="sorted")).sha256
