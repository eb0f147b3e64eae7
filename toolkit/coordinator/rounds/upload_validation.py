"""Checks of an upload: its size, its round and its files.

`toolkit/aggregation/update_validation.py` checks whether an update fits the global model.
"""

import math
from collections.abc import Callable

import msgspec
import numpy as np
from msgspec import UnsetType
from msgspec.structs import replace
from safetensors import SafetensorError
from safetensors.numpy import load_file

from device_agent.formats.evaluation_counts import EvaluationRequest
from device_agent.formats.manifest import Manifest, TensorEntry, encode, uploaded
from device_agent.formats.update import (
    RECORD,
    TENSORS,
    UpdateRecord,
    check_matches_bundle,
    decode_record,
)
from profiles.errors import UpdateError
from toolkit.coordinator.refusals import RefusalError, conflict, unusable, unusable_because
from toolkit.coordinator.rounds.count_validation import check_evaluation
from toolkit.coordinator.storage.blobs import Blobs

Update = tuple[UpdateRecord, dict[str, np.ndarray]]
CheckUpdate = Callable[[Update, str], None]
"""(update, its name in errors): raises UpdateError unless the update fits the global model."""

HEADROOM = 64 << 10
"""Bytes that the header of a tensor file may take in addition to the tensors."""
RECORD_BYTES = 256 << 10
"""The most bytes of an update's record, not counting its list of tensors."""


def is_finite(*values: float) -> bool:
    """Whether all `values` are finite numbers."""
    return all(math.isfinite(value) for value in values)


def tensor_bytes(table: tuple[TensorEntry, ...]) -> int:
    """Bytes of all tensors of `table`, without a file's header."""
    return sum(math.prod(entry.shape) * np.dtype(entry.dtype).itemsize for entry in table)


def size_limit(manifest: bytes) -> int:
    """The most bytes that an upload for this bundle may have."""
    return tensor_bytes(expected_tensors(manifest)) + HEADROOM


def expected_tensors(manifest: bytes) -> tuple[TensorEntry, ...]:
    """The tensors that an update for this bundle contains."""
    return uploaded(msgspec.json.decode(manifest, type=Manifest).tensors)


def too_large(limit: int) -> RefusalError:
    """The refusal (413) of an upload of more than `limit` bytes."""
    return RefusalError(
        "An update for this bundle has at most {limit_bytes} bytes: send {tensors} of the bundle "
        "that was offered.",
        status=413,
        code="update.too-large",
        limit_bytes=limit,
        tensors=TENSORS,
    )


def read_record(body: bytes) -> UpdateRecord:
    """The record in the body of a request. Raises RefusalError (422) if it is unusable."""
    try:
        record = decode_record(body, f"The {RECORD} of this request")
    except UpdateError as error:
        raise unusable_because(error) from None
    size = len(encode(replace(record, tensors=())))
    if size > RECORD_BYTES:
        raise unusable(
            "{record} must have at most {limit:,} bytes, not counting its list of tensors; it "
            "has {size:,}.",
            code="update.too-long-record",
            record=RECORD,
            limit=RECORD_BYTES,
            size=size,
        )
    return record


def check_upload(
    device: str,
    record: UpdateRecord,
    manifest: bytes,
    upload: str | None,
    blobs: Blobs,
    check: CheckUpdate,
    asked: EvaluationRequest | None,
) -> None:
    """Raise RefusalError unless `record`, and the tensors that came before it, can be aggregated.

    `upload` is the hash of these tensors; None if no tensors came. `asked` is the federated
    evaluation that the federation asks for. These checks are not repeated when the round is
    aggregated.
    """
    if upload is None or upload != record.file.sha256:
        raise conflict(
            "The tensors that this update describes (SHA-256 {sha256}) are not those that were "
            "sent last: PUT {tensors} first, then {record}.",
            code="round.tensors-not-sent",
            sha256=record.file.sha256[:12],
            tensors=TENSORS,
            record=RECORD,
        )
    path = blobs.path(upload)
    try:
        about = msgspec.json.decode(manifest, type=Manifest)
        check_matches_bundle(record, about, device)
        if not isinstance(record.evaluation, UnsetType):
            counts = [record.evaluation.before, record.evaluation.after]
            check_evaluation(counts, about, asked, device)
        if path.stat().st_size != record.file.size:
            raise UpdateError(
                "{device} announced {announced_bytes} bytes and sent {received_bytes}. Send the "
                "update again.",
                code="update.wrong-size",
                announced_bytes=record.file.size,
                received_bytes=path.stat().st_size,
                device=device,
            )
        check((record, load_file(path)), device)
    except SafetensorError as error:
        raise unusable_because(
            UpdateError(
                "{device}: {tensors} is not a safetensors file: {reason}.",
                code="update.unreadable-tensors",
                device=device,
                tensors=TENSORS,
                reason=str(error),
            )
        ) from None
    except UpdateError as error:
        raise unusable_because(error) from None
