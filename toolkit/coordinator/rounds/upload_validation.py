"""Checks on what a device sends, before it may touch the global model."""

import math

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from device_agent.formats.manifest import Manifest, TensorEntry, uploaded
from device_agent.formats.update import UPDATE_VERSION, UpdateRecord, check_tensors
from profiles.errors import UpdateError
from profiles.json_decoding import MalformedError, decode_json
from toolkit.coordinator.refusals import RefusalError, conflict, unusable
from toolkit.coordinator.storage.blobs import Blobs

HEADROOM = 64 << 10
"""Bytes that the header of a tensor file may take beyond the tensors themselves."""
MOST_SAMPLES = 10**12


def is_finite(*values: float) -> bool:
    """Whether all `values` are ordinary numbers."""
    return all(math.isfinite(value) for value in values)


def tensor_bytes(table: tuple[TensorEntry, ...]) -> int:
    """Bytes of all tensors of `table`, without any file's header."""
    return sum(math.prod(entry.shape) * np.dtype(entry.dtype).itemsize for entry in table)


def size_limit(manifest: bytes) -> int:
    """The most bytes that an upload for this bundle may have."""
    return tensor_bytes(expected_tensors(manifest)) + HEADROOM


def expected_tensors(manifest: bytes) -> tuple[TensorEntry, ...]:
    """The tensors that an update for this bundle carries."""
    return uploaded(msgspec.json.decode(manifest, type=Manifest).tensors)


def too_large(limit: int) -> RefusalError:
    """The refusal (413) of an upload of more than `limit` bytes."""
    return RefusalError(
        413,
        "too-large",
        f"An update for this bundle has at most {limit} bytes: send update.safetensors of the "
        "bundle that was offered.",
    )


def read_record(body: bytes) -> UpdateRecord:
    """Read update.json. Raises RefusalError (422) where it is none."""
    try:
        record = decode_json(body, UpdateRecord)
    except MalformedError as error:
        raise unusable(f"This is not an update.json: {error}.") from None
    if record.version != UPDATE_VERSION:
        raise unusable(
            f"This update has version {record.version}, the coordinator takes {UPDATE_VERSION}: "
            "install the same version of edgetailor on both sides."
        )
    return record


def check_update(
    device: str, record: UpdateRecord, manifest: bytes, upload: str | None, blobs: Blobs
) -> None:
    """Raise RefusalError unless `record`, and the tensors sent before it (`upload`), are usable."""
    if upload is None or upload != record.file.sha256:
        raise conflict(
            "tensors-missing",
            f"The tensors that this update describes (SHA-256 {record.file.sha256[:12]}) are not "
            "those that were sent last: PUT update.safetensors first, then update.json.",
        )
    _check_record(device, record, manifest)
    path = blobs.path(upload)
    if path.stat().st_size != record.file.size:
        raise unusable(
            f"{device} announced {record.file.size} bytes and sent {path.stat().st_size}: send "
            "the update again."
        )
    try:
        check_tensors(load_file(path), record.tensors, device)
    except SafetensorError as error:
        raise unusable(f"{device}: update.safetensors cannot be read: {error}.") from None
    except UpdateError as error:
        raise unusable(str(error)) from None


def _check_record(device: str, record: UpdateRecord, manifest: bytes) -> None:
    offered = msgspec.json.decode(manifest, type=Manifest)
    if (record.base, record.submodel) != (offered.base, offered.submodel):
        raise unusable(
            f"{device} says it trained {record.submodel!r} of the model {record.base[:12]}; its "
            f"bundle is {offered.submodel!r} of {offered.base[:12]}. Train the bundle again."
        )
    if record.tensors != uploaded(offered.tensors):
        raise unusable(
            f"{device}: the tensor table is not that of its bundle. Train the bundle again."
        )
    if record.profile is not None and record.profile.submodel != offered.submodel:
        raise unusable(
            f"{device}: the profile is of {record.profile.submodel!r}, the update of "
            f"{offered.submodel!r}. Train the bundle again."
        )
    if record.samples > MOST_SAMPLES:
        raise unusable(
            f"{device} says it trained on more than {MOST_SAMPLES:,} samples: no device has so "
            "many. Train the bundle again."
        )
    if record.samples < 1 or not is_finite(record.loss_first, record.loss_last):
        raise unusable(
            f"{device} trained on {record.samples} samples to a loss of {record.loss_last}: an "
            "update needs at least one sample and finite losses."
        )
