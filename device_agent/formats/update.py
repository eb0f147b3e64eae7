"""An update: the result that a device sends back after training a bundle.

It is a folder of two files: `update.safetensors` holds the uploaded tensors under their names in
the bundle, and `update.json` describes them.
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
from device_agent.formats.manifest import (
    Count,
    FileEntry,
    Manifest,
    Struct,
    TensorEntry,
    encode,
    uploaded,
)
from device_agent.formats.protocol import InputSummary
from profiles.documents.bundle_profile import Profile
from profiles.errors import InputError, UpdateError
from profiles.json_decoding import MalformedError, decode_strictly
from profiles.text_formatting import loss_figure

UPDATE_VERSION = 1
RECORD = "update.json"
TENSORS = "update.safetensors"
DIVERGED = "The loss is not finite: training diverged. Lower the learning rate."
MOST_SAMPLES = 10**12
"""No device has more samples. The bound keeps sums that are weighted by samples within float32."""
MOST_CLASSES = 1000
"""With more classes a device reports no counts by class: its record would become too long."""
MOST_EVALUATED = 10**9
"""No device evaluates more samples in a round: that would take years."""


class Evaluation(Struct, frozen=True, kw_only=True):
    """Mean `loss` over the labels of `samples` samples, and how many predictions are `correct`.

    `counted` is the number of labels that count: samples, or positions that are not ignored. Agents
    before 0.2 do not send it. `correct` is None for a regression.
    """

    samples: Count
    loss: float
    correct: Count | None
    counted: Count | None = None

    @property
    def accuracy(self) -> float | None:
        """Share of correct predictions, from 0 to 1; None for a regression or without labels."""
        counted = self.samples if self.counted is None else self.counted
        return self.correct / counted if self.correct is not None and counted else None

    def __str__(self) -> str:
        accuracy = "" if self.accuracy is None else f", accuracy {self.accuracy:.1%}"
        return f"loss {loss_figure(self.loss)}{accuracy}"


class EvaluationCounts(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a model predicts samples on which its device never trains.

    Counts can be added up over devices, and say nothing about a single sample.

    Attributes:
        samples: Number of evaluated samples.
        counted: Number of labels that count: samples, or positions that are not ignored.
        correct: How many of these labels are predicted correctly. None for a regression and for
            label sequences (CTC).
        loss_sum: Sum of the loss over these labels. In a regression the loss of a sample is its
            mean squared error. There is no absolute error, because bundles do not compute it.
        classes: For each class, its number of labels and how many of them are predicted correctly.
            None unless the federation asks for it and the owner agrees.
    """

    samples: Count
    counted: Count
    correct: Count | None = None
    loss_sum: float
    classes: tuple[tuple[Count, Count], ...] | None = None

    def means(self) -> Evaluation:
        """The mean loss, with the counts."""
        return Evaluation(
            samples=self.samples,
            loss=self.loss_sum / max(self.counted, 1),
            correct=self.correct,
            counted=self.counted,
        )


class Judgement(Struct, frozen=True, kw_only=True):
    """How a device predicts its held-out samples with a model that it does not train.

    `bundle` is the SHA-256 of the manifest of the evaluated bundle.
    """

    bundle: str
    counts: EvaluationCounts


class LocalEvaluation(Struct, frozen=True, kw_only=True):
    """The received model on the device's held-out samples, and its own model after training."""

    before: EvaluationCounts
    after: EvaluationCounts


class UpdateRecord(Struct, frozen=True, kw_only=True):
    """The content of `update.json`.

    `read_update` returns it together with the tensors. Use it to log, weigh or refuse an update.

    Attributes:
        version: Format version.
        bundle: SHA-256 of the bundle's manifest.
        base: Fingerprint of the global model from which the bundle was cut.
        submodel: The submodel spec.
        samples: Number of samples that the device trained on.
        steps: Number of training steps.
        loss_first: Mean loss over the first local epoch.
        loss_last: Mean loss over the last local epoch.
        tensors: The uploaded tensors.
        file: Size and SHA-256 of `update.safetensors`.
        profile: Time and memory of the training; only devices of a federation send it.
        validation: The evaluation on held-out samples after each epoch.
        classes: The classes that the device trained on, ascending; None unless the bundle has a
            masked loss.
        inputs: A coarse summary of the inputs, if the coordinator sent a summary of its samples.
            Otherwise the field is absent, because coordinators before 0.2 refuse it.
        evaluation: The counts of a federated evaluation, if the coordinator asked for them and the
            device has enough samples. Otherwise the field is absent.
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
    """Decode the content of an `update.json`. Errors name it by `origin`.

    Raises UpdateError if it is malformed or has another version.
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
        check_counts(record.evaluation.before, origin)
        check_counts(record.evaluation.after, origin)


def check_counts(counts: EvaluationCounts, origin: str) -> None:
    """Raise UpdateError unless an evaluation of samples can have given `counts`."""
    if not math.isfinite(counts.loss_sum):
        raise UpdateError(DIVERGED, code="update.diverged")
    problem = _impossible(counts)
    if problem is not None:
        raise UpdateError(
            "{origin} reports counts of its evaluation that are impossible: {problem}. Train the "
            "bundle again.",
            code="update.unusable-evaluation",
            origin=origin,
            problem=problem,
        )


def _impossible(counts: EvaluationCounts) -> str | None:
    """Why no evaluation can have given `counts`; None if one can."""
    if not 1 <= counts.samples <= MOST_EVALUATED:
        return f"{counts.samples:,} samples, where 1 to {MOST_EVALUATED:,} are possible"
    if counts.correct is not None and counts.correct > counts.counted:
        return f"{counts.correct:,} of {counts.counted:,} labels are correct"
    if counts.loss_sum < 0:
        return f"a sum of losses below zero, {counts.loss_sum:g}"
    if counts.classes is None:
        return None
    labels, correct = (sum(pair[column] for pair in counts.classes) for column in (0, 1))
    if (labels, correct) != (counts.counted, counts.correct):
        return "the counts of the classes do not add up to those of all"
    if any(right > of for of, right in counts.classes):
        return "a class has more correct labels than labels"
    return None


def _shown(number: int) -> str:
    """Format an integer of any length for people."""
    return f"{number:,}" if abs(number) <= 1000 * MOST_SAMPLES else f"more than {MOST_SAMPLES:,}"


def check_tensors(
    tensors: Mapping[str, np.ndarray], table: tuple[TensorEntry, ...], origin: str
) -> None:
    """Raise UpdateError unless `tensors` are those of `table` and all numbers are finite."""
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
                "{origin}: {tensor!r} holds a number that is not finite; training diverged. Lower "
                "the learning rate and train again.",
                code="update.not-finite",
                tensor=name,
                origin=origin,
            )


def check_trained(record: UpdateRecord, tensors: Mapping[str, np.ndarray]) -> None:
    """Raise UpdateError if no server would accept this record and these tensors."""
    check_tensors(tensors, record.tensors, "This update")
    check_record(record, "This update")


def check_matches_bundle(record: UpdateRecord, manifest: Manifest, origin: str) -> None:
    """Raise UpdateError unless `record` describes a training of the bundle of `manifest`."""
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
    """Raise InputError if `out` exists, unless `force` is given and `out` is an update."""
    refuse_existing(out, force)
    if out.exists() and not (out / RECORD).is_file():
        raise InputError(
            "{path} is not an update, so --force does not replace it: give another place.",
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
        record: The record; its `file` is filled in.
        tensors: The tensors that `record.tensors` describes.
        force: Replace an update that exists at `out`.
        staging: Folder for incomplete files; see `write_folder`.

    Returns:
        The record with size and hash of the tensor file.

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

    Use it on the server, before `aggregate`, `recover` or `Aggregation.add`.

    Args:
        folder: The folder that `edgetailor-agent train --out` wrote.

    Returns:
        The record, and the tensors by their names in the bundle.

    Raises:
        UpdateError: A file is missing, damaged or of another version, or the tensors differ from
            those that the record describes.

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
