"""Records what a device did with the releases that it was offered, and reports it.

A change of release.json and the report about it are one atomic write. So a device that is killed
after the change still sends the report.
"""

import logging
import shutil
from collections.abc import Callable

from msgspec.structs import replace

from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.federation.offered_files import manifest_of
from device_agent.federation.release_folder import (
    MOST_REFUSED,
    DeviceReleases,
    InstalledRelease,
    ReleasePointer,
)
from device_agent.federation.stop_report import without_folders
from device_agent.formats.evaluation_counts import EvaluationCounts
from device_agent.formats.manifest import encode
from device_agent.formats.protocol.releases import ReleaseOffer, ReleaseReport
from device_agent.inference.fine_tuning import FineTuned
from device_agent.inference.release_trial import TrialResult
from device_agent.system.disk_space import storage_error
from profiles.errors import EdgeTailorError, StorageError
from profiles.json_decoding import MalformedError, decode_json

log = logging.getLogger(__name__)
WORSE = "release.worse"
"""Code of the report that a release was worse in the trial of the device."""
EARLIER = "release.earlier"
"""Code of the report that a release has a lower number than the release of the device."""
NOTHING = ReleaseReport(number=0, bundle="", taken=True, runs=0)


class ReleaseOutcomes:
    """The outcomes of offers of releases.

    Args:
        folder: The releases of this device.
        client: The coordinator.
        only_sums: Whether reports must have no figures of this device, because the federation uses
            secure sums, or its samples are private.

    Attributes:
        pointer: The content of release.json.
    """

    def __init__(
        self,
        folder: DeviceReleases,
        client: CoordinatorClient,
        only_sums: Callable[[], bool],
    ) -> None:
        self._folder, self._client, self._only_sums = folder, client, only_sums
        self.pointer = folder.read()
        self._unsent = _decoded(self.pointer.unsent)

    def switch(
        self, release: InstalledRelease | None, offer: ReleaseOffer, report: ReleaseReport
    ) -> None:
        """Switch to `release`; None for no release."""
        current, previous = self.pointer.current, self.pointer.previous
        if offer.back:
            previous = None
        elif current is not None and release is not None and current.bundle != release.bundle:
            previous = current
        self._write(
            replace(
                self.pointer,
                current=release,
                previous=previous,
                issued=offer.issued,
                unsent=_encoded(report),
            )
        )

    def leave_withdrawn(self, offer: ReleaseOffer) -> None:
        """Leave a withdrawn release, but do not take `offer`, which this device refused before."""
        previous = self.pointer.previous
        if previous is not None and previous.number > offer.number:  # withdrawn, too
            previous = None
        runs = 0 if previous is None else previous.number
        trial = TrialResult(reason="this device has refused it before")
        report = replace(self.report(offer, trial), taken=False, runs=runs)
        self.switch(previous, offer, report)
        log.info("Release %d was refused before: back to release %d.", offer.number, report.runs)

    def refuse(self, offer: ReleaseOffer, report: ReleaseReport) -> None:
        """Refuse the offered release, also after the next start of the agent."""
        log.warning("Release %d was not taken: %s", offer.number, report.reason)
        release = offered_release(offer)
        assert release is not None
        refused = (*self.pointer.refused, release)[-MOST_REFUSED:]
        self._write(
            replace(self.pointer, refused=refused, issued=offer.issued, unsent=_encoded(report))
        )

    def keep_better(
        self,
        offer: ReleaseOffer,
        current: InstalledRelease,
        before: EvaluationCounts | None,
        tuned: FineTuned,
    ) -> None:
        """Switch to the better one of the release and its fine-tuned model.

        Args:
            offer: The offer that asks for the fine-tuning.
            current: The release.
            before: The counts of the model before the release, which are reported again.
            tuned: The result of the fine-tuning.
        """
        sha256 = "" if tuned.bundle is None else self._folder.adopt(tuned.bundle)
        asked = offer.evaluation is not None
        report = ReleaseReport(
            number=offer.number,
            bundle=current.bundle,
            taken=True,
            runs=offer.number,
            before=before,
            after=tuned.released if asked else None,
            fine_tuned=tuned.tuned if asked else None,
            runs_fine_tuned=bool(sha256),
        )
        fine_tuned = replace(current, fine_tuned=sha256)
        self._write(replace(self.pointer, current=fine_tuned, unsent=_encoded(report)))
        shutil.rmtree(self._folder.scratch, ignore_errors=True)
        log.info("The %s model is better.", "fine-tuned" if sha256 else "released")

    def fail(self, offer: ReleaseOffer, error: EdgeTailorError) -> None:
        """Report that `offer` was not taken because of `error`. It may be tried again."""
        self._unsent = self.report(offer, error=error)

    def report_later_release(self, offer: ReleaseOffer, reason: str) -> None:
        """Report that the release of this device is later than `offer`, for this `reason`."""
        self._unsent = self.report(offer, TrialResult(reason=reason), refusal=EARLIER)

    def report(
        self,
        offer: ReleaseOffer,
        trial: TrialResult | None = None,
        error: EdgeTailorError | None = None,
        refusal: str = WORSE,
    ) -> ReleaseReport:
        """The report about `offer` after a trial or an error.

        If the trial gives a reason not to take the release, `refusal` is the code of this reason.
        """
        code, reason = "", ""
        if error is not None:
            code, reason = error.code, without_folders(str(error))
        elif trial is not None and trial.reason is not None:
            code, reason = refusal, trial.reason
        asked = trial is not None and offer.evaluation is not None
        return ReleaseReport(
            number=offer.number,
            bundle=manifest_of(offer.files),
            taken=not code,
            runs=self.pointer.runs if code else offer.number,
            code=code,
            reason=reason,
            before=trial.before if trial is not None and asked else None,
            after=trial.after if trial is not None and asked else None,
        )

    def unsent_before(self, offer: ReleaseOffer) -> EvaluationCounts | None:
        """The counts of the model before `offer`, if the report with them is not sent yet."""
        last = self._unsent
        return None if last is None or last.number != offer.number else last.before

    def send(self) -> None:
        """Send the last report, if the coordinator does not have it yet."""
        if self._unsent is None:
            return
        report = _without_figures(self._unsent) if self._only_sums() else self._unsent
        if self._client.report_release(report):
            self._unsent = None
            if self.pointer.unsent:
                try:
                    self._write(replace(self.pointer, unsent=""))
                except OSError as error:  # the next start of the agent sends it once more
                    log.info("%s", storage_failure(error))

    def _write(self, pointer: ReleasePointer) -> None:
        self._folder.write(pointer)
        self.pointer, self._unsent = pointer, _decoded(pointer.unsent)


def offered_release(offer: ReleaseOffer) -> InstalledRelease | None:
    """The release that `offer` offers; None for no release."""
    if not offer.number:
        return None
    bundle = manifest_of(offer.files)
    return InstalledRelease(number=offer.number, round=offer.round, bundle=bundle)


def storage_failure(error: OSError) -> StorageError:
    """Turn `error` into an error of the state folder."""
    return storage_error(error) or StorageError(
        "{file}: {reason}. Check the state folder of this device.",
        code="storage.unusable-releases",
        file=error.filename or "A file of a release",
        reason=error.strerror or str(error),
    )


def _encoded(report: ReleaseReport) -> str:
    """Encode the report as JSON.

    Commands that only read release.json then need not import its type.
    """
    return encode(report).decode()


def _decoded(text: str) -> ReleaseReport | None:
    """The report in `text`; None if there is none, or another version of the agent wrote it."""
    try:
        return decode_json(text, ReleaseReport) if text else None
    except MalformedError:
        return None


def _without_figures(report: ReleaseReport) -> ReleaseReport:
    """The `report` without counts, and without a reason that is made of them."""
    reason = "worse on the samples of this device" if report.code == WORSE else report.reason
    return replace(report, before=None, after=None, fine_tuned=None, reason=reason)
