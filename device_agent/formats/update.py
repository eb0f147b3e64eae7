"""An update: the result that a device sends back after training a bundle.

An update is a folder of two files. `update.safetensors` contains the uploaded tensors under their
names in the bundle. `update.json` describes them.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from device_agent.formats.atomic_files import fingerprint, refuse_existing, write_folder
from device_agent.formats.evaluation_counts import (
    DIVERGED,
    Evaluation,
    LocalEvaluation,
    check_counts,
)
from device_agent.formats.manifest import (
    Count,
    FileEntry,
    Manifest,
    Struct,
    TensorEntry,
    encode,
    uploaded,
)
from device_agent.formats.protocol.rounds import InputSummary
from profiles.documents.bundle_profile import Profile
from profiles.errors import InputError, UpdateError
from profiles.json_decoding import MalformedError, decode_strictly

UPDATE_VERSION = 1
RECORD = "update.json"
TENSORS = "update.safetensors"
MOST_SAMPLES = 10**12
"""No device has more samples. The bound keeps sums weighted by samples within the range of
float32."""


class UpdateRecord(Struct, frozen=True, kw_only=True):
    """The content of `update.json`.

    `read_update` returns a record and the tensors. Use the record to log, weigh or refuse an
    update.

    Attributes:
        version: Format version.
        bundle: SHA-256 of the bundle's manifest.
        base: Fingerprint of the global model from which the bundle was cut.
        submodel: The submodel spec.
        samples: Number of samples that the device trained on.
        steps: Number of training steps.
        loss_first: Mean loss over the first local epoch; 0 if the bundle promises privacy for
            samples.
        loss_last: Mean loss over the last local epoch; 0 if the bundle promises privacy for
            samples.
        tensors: The uploaded tensors.
        file: Size and SHA-256 of `update.safetensors`.
        profile: Time and memory of the training. Only devices of a federation send this field.
        validation: The evaluation on held-out samples after each epoch; empty if the bundle
            promises privacy for samples.
        classes: The classes that the device trained on, ascending; None unless the bundle has a
            masked loss.
        inputs: A coarse summary of the inputs, if the coordinator sent a summary of its samples.
            Otherwise this field is left out, because coordinators before 0.2 refuse it.
        evaluation: The counts of a federated evaluation. Left out unless the coordinator asked for
            these counts and the device has enough samples.
    """

    version: int = UPDATE_VERSION
    bundle: str
    base: str
    submodel: str
    samples: int
    steps: Count
    loss_first: float
    loss_last: float
    tensors: tuple[TensorEntry, ...]
    file: FileEntry
    profile: Profile | None = None
    validation: tuple[Evaluation, ...] = ()
    classes: tuple[Count, ...] | None = None
    inputs: InputSummary | UnsetType = UNSET
    evaluation: LocalEvaluation | UnsetType = UNSET

    def losses(self, digits: int) -> str:
        """Format the losses of the first and last epoch; only one number if both are equal.

        `digits` is the number of decimals.
        """
        first, last = f"{self.loss_first:.{digits}f}", f"{self.loss_last:.{digits}f}"
        return first if self.loss_first == self.loss_last else f"{first} to {last}"


def decode_record(data: bytes, origin: str) -> UpdateRecord:
    """Decode the content of an `update.json`.

    Raises UpdateError if the content is malformed or has another version. The message names
    `origin`.
    """
    try:
        record = decode_strictly(data, UpdateRecord)
    except MalformedError as error:
        raise UpdateError(
            "{origin} is not an update record: {reason}.",
            code="update.malformed-record",
            origin=origin,
            reason=str(error),
        ) from None
    if record.version != UPDATE_VERSION:
        raise UpdateError(
            "{origin} has version {found}; this program reads {supported}. Install the same "
            "version of edgetailor on both sides.",
            code="update.wrong-version",
            found=record.version,
            supported=UPDATE_VERSION,
            origin=origin,
        )
    return record


def check_record(record: UpdateRecord, origin: str) -> None:
    """Raise UpdateError unless `record` has a usable number of samples and finite losses."""
    if not 1 <= record.samples <= MOST_SAMPLES:
        # A number in JSON may have any length. The error's value must be readable by all programs.
        samples = min(max(record.samples, -1), MOST_SAMPLES + 1)
        raise UpdateError(
            "{origin}: an update must be trained on 1 to {most:,} samples, not on {given}. Train "
            "the bundle again.",
            code="update.unusable-samples",
            samples=samples,
            most=MOST_SAMPLES,
            origin=origin,
            given=_shown(record.samples),
        )
    losses = (
        record.loss_first,
        record.loss_last,
        *(evaluation.loss for evaluation in record.validation),
    )
    if not all(map(math.isfinite, losses)):
        raise UpdateError(DIVERGED, code="update.diverged")
    for evaluation in record.validation:
        if evaluation.counted is not None and (evaluation.correct or 0) > evaluation.counted:
            raise UpdateError(
                "{origin} claims {correct:,} correct predictions out of {counted:,}, which is "
                "impossible. Train the bundle again.",
                code="update.unusable-validation",
                origin=origin,
                correct=evaluation.correct,
                counted=evaluation.counted,
            )
    if not isinstance(record.evaluation, UnsetType):
        check_counts(record.evaluation.before, origin, signed=True)
        check_counts(record.evaluation.after, origin, signed=True)


def _shown(number: int) -> str:
    """Format an integer of any length for people."""
    return f"{number:,}" if abs(number) <= 1000 * MOST_SAMPLES else f"more than {MOST_SAMPLES:,}"


def check_tensors(
    tensors: Mapping[str, np.ndarray], table: tuple[TensorEntry, ...], origin: str
) -> None:
    """Raise UpdateError unless `tensors` are finite and are the tensors of `table`."""
    expected = {entry.name: entry for entry in table}
    for name in sorted(expected.keys() - tensors.keys()):
        raise UpdateError(
            "{origin}: the tensor {tensor!r} is missing; the update is not from this bundle.",
            code="update.missing-tensor",
            tensor=name,
            origin=origin,
        )
    for name in sorted(tensors.keys() - expected.keys()):
        raise UpdateError(
            "{origin}: unexpected tensor {tensor!r}; the update is not from this bundle.",
            code="update.unexpected-tensor",
            tensor=name,
            origin=origin,
        )
    for name, array in tensors.items():
        entry = expected[name]
        if tuple(array.shape) != entry.shape or array.dtype.name != entry.dtype:
            raise UpdateError(
                "{origin}: {tensor!r} is {found_dtype} {found_shape}; its bundle says "
                "{expected_dtype} {expected_shape}.",
                code="update.wrong-shape",
                tensor=name,
                found_dtype=array.dtype.name,
                found_shape=tuple(array.shape),
                expected_dtype=entry.dtype,
                expected_shape=entry.shape,
                origin=origin,
            )
        if not np.isfinite(array).all():
            raise UpdateError(
                "{origin}: {tensor!r} contains a number that is not finite; training diverged. "
                "Lower the learning rate and train again.",
                code="update.not-finite",
                tensor=name,
                origin=origin,
            )


def check_trained(record: UpdateRecord, tensors: Mapping[str, np.ndarray]) -> None:
    """Raise UpdateError if every server would refuse this record or these tensors."""
    check_tensors(tensors, record.tensors, "This update")
    check_record(record, "This update")


def check_matches_bundle(record: UpdateRecord, manifest: Manifest, origin: str) -> None:
    """Raise UpdateError unless `record` describes a training of the bundle with `manifest`."""
    if (record.base, record.submodel) != (manifest.base, manifest.submodel):
        raise UpdateError(
            "{origin} is an update of {submodel!r} from the model {base}; its bundle is "
            "{expected_submodel!r} from the model {expected_base}. Train the bundle again.",
            code="update.other-bundle",
            submodel=record.submodel,
            expected_submodel=manifest.submodel,
            origin=origin,
            base=record.base[:12],
            expected_base=manifest.base[:12],
        )
    if record.tensors != uploaded(manifest.tensors):
        raise UpdateError(
            "{origin}: the tensors of the update differ from those of its bundle. Train the bundle "
            "again.",
            code="update.other-tensors",
            origin=origin,
        )
    if record.profile is not None and record.profile.submodel != manifest.submodel:
        raise UpdateError(
            "{origin}: the profile is for {submodel!r}, but the update is for "
            "{expected_submodel!r}. Train the bundle again.",
            code="update.other-profile",
            submodel=record.profile.submodel,
            expected_submodel=manifest.submodel,
            origin=origin,
        )


def check_place(out: Path, force: bool = False) -> None:
    """Raise InputError if `out` exists, unless `force` is given and `out` has only an update."""
    refuse_existing(out, force)
    files = {path.name for path in out.iterdir()} if out.is_dir() else set()
    if out.exists() and not {RECORD} <= files <= {RECORD, TENSORS}:
        raise InputError(
            "{path} is not an update, or has other files too, so --force does not replace it: give "
            "another place.",
            code="file.not-replaceable",
            path=str(out),
        )


def write_update(
    out: Path,
    record: UpdateRecord,
    tensors: Mapping[str, np.ndarray],
    force: bool = False,
    staging: Path | None = None,
) -> UpdateRecord:
    """Write the two files of an update to the new folder `out`, atomically.

    Args:
        out: The folder to create.
        record: The record. This function fills in `file`.
        tensors: The tensors that `record.tensors` describes.
        force: Replace an update that exists at `out`.
        staging: Folder for incomplete files; see `write_folder`.

    Returns:
        The record with the size and the hash of the tensor file.

    Raises:
        UpdateError: Every server would refuse the tensors or losses.
        InputError: `out` exists and may not be replaced.
    """
    check_trained(record, tensors)
    data = save({name: np.asarray(array, order="C") for name, array in tensors.items()})
    record = replace(record, file=fingerprint(data))
    check_place(out, force)
    write_folder(out, {TENSORS: data, RECORD: encode(record)}, force, staging)
    return record


def read_update(folder: str | Path) -> tuple[UpdateRecord, dict[str, np.ndarray]]:
    """Read and check an update.

    Use this on the server, before `aggregate`, `recover` or `Aggregation.add`.

    Args:
        folder: The folder that `edgetailor-agent train --out` wrote.

    Returns:
        The record, and the tensors by their names in the bundle.

    Raises:
        UpdateError: A file is missing, damaged or of another version, or the tensors differ from
            the record.

    Examples:
        >>> import edgetailor as et
        >>> record, tensors = et.read_update("update")  # doctest: +SKIP
        >>> record.samples  # doctest: +SKIP
        1231
    """
    folder = Path(folder)
    try:
        encoded = (folder / RECORD).read_bytes()
        data = (folder / TENSORS).read_bytes()
    except FileNotFoundError as error:
        raise UpdateError(
            "{folder} is not an update: {file} is missing. Give the folder that `edgetailor-agent "
            "train --out` wrote.",
            code="update.missing-file",
            file=Path(error.filename).name,
            folder=folder,
        ) from None
    except NotADirectoryError:
        raise UpdateError(
            "{path} is a file; an update is a folder.",
            code="update.not-a-folder",
            path=str(folder),
        ) from None
    record = decode_record(encoded, str(folder / RECORD))
    # If the hash differs, the copy is usually incomplete. So the advice is to copy again.
    if fingerprint(data) != record.file:
        raise UpdateError(
            "{path} is not the file that {record} describes (size or SHA-256 differ): copy the "
            "update again.",
            code="update.altered-file",
            file=TENSORS,
            path=folder / TENSORS,
            record=RECORD,
        )
    try:
        tensors: dict[str, np.ndarray] = load_file(folder / TENSORS)
    except SafetensorError as error:
        raise UpdateError(
            "{path} cannot be read: {reason}.",
            code="update.unreadable-tensors",
            file=TENSORS,
            path=folder / TENSORS,
            reason=str(error),
        ) from None
    check_tensors(tensors, record.tensors, str(folder))
    return record, tensors
