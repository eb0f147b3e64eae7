"""The offer of a release to a device, and the device's report about it."""

from dataclasses import dataclass, field

from device_agent.formats.evaluation_counts import EvaluationCounts, EvaluationRequest, check_counts
from device_agent.formats.manifest import Count, Struct
from device_agent.formats.protocol.transfers import FileOffer
from profiles.errors import UpdateError


@dataclass(frozen=True, kw_only=True)
class ReleaseOffer:
    """The release with which a device should predict, as a bundle that only predicts.

    `number` counts releases from 1. If it is 0, there are no files, and the device should have no
    release. `round` is the round whose model the release has. `files` are the files of the bundle.
    If `back` is set, the operator has withdrawn a later release, and the device returns to this
    release without a trial. If `evaluation` is set, the device tries the release on the samples on
    which it never trains, and reports counts. `issued` is the time of the operator's last change,
    in seconds since 1970. `signature` is the coordinator's signature of `signed_work.release_text`.

    If `fine_tune` is set and the owner agrees, the device trains the released model for `fine_tune`
    steps on its own samples, and uses the better model. `training` are the files of the bundle for
    this training.
    """

    number: Count
    round: Count = 0
    files: list[FileOffer] = field(default_factory=list)
    back: bool = False
    evaluation: EvaluationRequest | None = None
    issued: Count = 0
    signature: str = ""
    fine_tune: Count = 0
    training: list[FileOffer] = field(default_factory=list)


class ReleaseReport(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer of a device to the offer of a release. A later answer replaces it.

    Attributes:
        number: The release that was offered; 0 if all releases were withdrawn.
        bundle: SHA-256 of the manifest of the offered bundle; empty if `number` is 0.
        taken: Whether the device now predicts with the offered release.
        runs: The release with which the device now predicts; 0 if there is none.
        code: Error code of the reason why the release was not taken.
        reason: The same reason as a sentence, without folder names.
        before: Counts of the model that the device had before. None if the federation does not
            evaluate on devices, or if there was no trial.
        after: Counts of the offered release. None in the same cases as `before`.
        fine_tuned: Counts of the release after fine-tuning on this device. None without
            fine-tuning.
        runs_fine_tuned: Whether the device predicts with the fine-tuned model.
    """

    number: Count
    bundle: str
    taken: bool
    runs: Count
    code: str = ""
    reason: str = ""
    before: EvaluationCounts | None = None
    after: EvaluationCounts | None = None
    fine_tuned: EvaluationCounts | None = None
    runs_fine_tuned: bool = False


def check_report(report: ReleaseReport, origin: str) -> None:
    """Raise UpdateError if `report` has impossible counts or contradicts itself."""
    for counts in (report.before, report.after, report.fine_tuned):
        if counts is not None:
            check_counts(counts, origin)
    if report.taken and report.runs != report.number:
        raise UpdateError(
            "{origin} reports that it has taken release {number}, but also that it runs release "
            "{runs}.",
            code="release.contradicting-report",
            origin=origin,
            number=report.number,
            runs=report.runs,
        )
