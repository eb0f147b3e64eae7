"""Follows the coordinator's offers of releases, when the device has nothing to train."""

import logging
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.client.replies import RefusedError
from device_agent.federation.offered_files import check_offers, manifest_of
from device_agent.federation.release_folder import (
    MOST_REFUSED,
    DeviceReleases,
    InstalledRelease,
    ReleasePointer,
)
from device_agent.federation.releases.release_attempts import ReleaseAttempts
from device_agent.federation.stop_report import without_folders
from device_agent.formats.evaluation_counts import EvaluationCounts, EvaluationRequest
from device_agent.formats.manifest import MANIFEST, encode
from device_agent.formats.protocol.releases import ReleaseOffer, ReleaseReport
from device_agent.formats.signed_work import check_release
from device_agent.inference.fine_tuning import FineTuned
from device_agent.inference.release_trial import TrialResult
from device_agent.log_format import fields
from device_agent.system.disk_space import room, storage_error
from profiles.errors import (
    AuthorisationError,
    BundleError,
    DataError,
    EdgeTailorError,
    LimitError,
    StorageError,
    TrustError,
    UpdateError,
)
from profiles.json_decoding import MalformedError, decode_json
from profiles.text_formatting import format_bytes

log = logging.getLogger(__name__)
PATIENCE_S = 60.0
"""How long the download of a release's file is tried, in seconds. Rounds must not wait for it."""
AGAIN_S = 3600.0
"""Seconds until a release is tried again, if it could not be downloaded, or if the disk or the
memory was too small for it."""
WORSE = "release.worse"
"""Code of the report that a release was worse in the trial of the device."""
EARLIER = "release.earlier"
"""Code of the report that a release has a lower number than the release of the device."""
NOTHING = ReleaseReport(number=0, bundle="", taken=True, runs=0)
CheckSigned = Callable[[Callable[[str], None]], None]
Trial = Callable[[Path, Path | None, EvaluationRequest | None], TrialResult]
"""(offered bundle, present bundle, the federation's evaluation) -> the result of the trial."""
FineTune = Callable[[ReleaseOffer, Path], FineTuned]
"""(the offer, the bundle of the release) -> the fine-tuned model, if it is better."""


class Releases:
    """Fetches releases, tries them and switches to them.

    Args:
        folder: The releases of this device.
        received: The folder of the last received training bundle, with which the first release is
            compared.
        client: The coordinator.
        check_signed: Calls a check with the coordinator's public key, as `TrustedKey.check` does.
        trial: Compares a release with the present model.
        tune: Fine-tunes a release; None if the owner has not agreed to that.
        only_sums: Whether reports must have no figures of this device, because the federation uses
            secure sums, or its samples are private.
    """

    def __init__(
        self,
        folder: DeviceReleases,
        received: Path,
        client: CoordinatorClient,
        check_signed: CheckSigned,
        trial: Trial,
        tune: FineTune | None = None,
        only_sums: Callable[[], bool] = lambda: False,
    ) -> None:
        self._folder, self._received, self._client = folder, received, client
        self._only_sums = only_sums
        self._check_signed, self._trial, self._tune = check_signed, trial, tune
        self._pointer = folder.read()
        self._unsent = _decoded(self._pointer.unsent)
        self._postponed: dict[str, float] = {}
        self._verified, self._told, self._earlier = "", "", 0
        self._attempts = ReleaseAttempts(folder.attempts)

    def follow(self, offer: ReleaseOffer | None) -> None:
        """Do what `offer` asks for, unless this is done already, and report the result.

        Errors do not stop the rounds: they are logged, and the release is tried again later.
        """
        if offer is not None:
            try:
                self._follow(offer)
            except AuthorisationError:
                raise
            except TrustError as error:
                self._tell(str(error))
            except (EdgeTailorError, RefusedError) as error:
                self._postpone(offer, error)
            except OSError as error:
                self._postpone(offer, _failure(error))
            self._fine_tune(offer)
        self._send()

    def _follow(self, offer: ReleaseOffer) -> None:
        """Fetch, try and report the offered release, unless that is done already."""
        if self._is_answered(offer):
            return
        self._check(offer)
        try:
            self._install(offer)
        except BundleError as error:
            self._refuse(offer, self._report(offer, error=error))

    def _is_answered(self, offer: ReleaseOffer) -> bool:
        """Whether this device has already done what `offer` asks for, or has postponed it."""
        current, release = self._pointer.current, _release(offer)
        if current is None or release is None:
            if current is release:
                return True
        elif current.is_release(release):
            return self._verify(offer)
        if current is not None and offer.number < current.number and not offer.back:
            self._keep_later(offer, current)
            return True
        refused = release in self._pointer.refused and not self._goes_back(offer)
        return refused or time.monotonic() < self._postponed.get(manifest_of(offer.files), 0)

    def _keep_later(self, offer: ReleaseOffer, current: InstalledRelease) -> None:
        """Report once that the coordinator offers an earlier release without a request to go back.

        This happens after an old backup of the coordinator was restored.
        """
        if offer.number == self._earlier:
            return
        self._earlier = offer.number
        reason = f"the device already has the later release {current.number}"
        log.warning("Release %d was not taken: %s", offer.number, reason)
        self._unsent = self._report(offer, TrialResult(reason=reason), refusal=EARLIER)

    def _goes_back(self, offer: ReleaseOffer) -> bool:
        """Whether this device has to go back to `offer`, because a later release was withdrawn.

        False if the device does not have a later release.
        """
        return offer.back and self._pointer.runs > offer.number

    def _verify(self, offer: ReleaseOffer) -> bool:
        """Whether all files of the current release are undamaged.

        Reads them once in a run of the agent.
        """
        bundle = manifest_of(offer.files)
        if self._verified != bundle and bundle:
            if self._folder.missing(offer.files):
                return False
            self._verified = bundle
        return True

    def _check(self, offer: ReleaseOffer) -> None:
        """Raise TrustError unless `offer` is signed and newer than the last that was followed."""
        self._check_signed(partial(check_release, offer))
        if offer.issued < self._pointer.issued:
            raise TrustError(
                "The offer of release {number} is older than the newest offer that this device has "
                "handled. Somebody may have sent an old message again. Nothing was changed.",
                code="trust.old-release",
                number=offer.number,
                issued=offer.issued,
                newest=self._pointer.issued,
            )

    def _install(self, offer: ReleaseOffer) -> None:
        """Fetch and try the offered release.

        Switch to it unless it is worse than the present model.
        """
        release, current = _release(offer), self._pointer.current
        if release is None:
            self._switch(None, offer, NOTHING)
            log.info("All releases were withdrawn: this device has no release any more.")
            return
        if release in self._pointer.refused:
            self._leave_withdrawn(offer)
            return
        check_offers(offer.files)
        self._fetch(offer)
        report = self._report(offer)
        # A model may be released again.
        present = None if current is None else current.bundle
        if not self._goes_back(offer) and present != release.bundle:
            with self._attempts.attempt(f"trying release {offer.number}", offer.round):
                trial = self._trial(
                    self._folder.bundle(release.bundle), self._present, offer.evaluation
                )
            report = self._report(offer, trial)
            if trial.reason is not None:
                self._refuse(offer, report)
                return
        self._switch(release, offer, report)
        about = fields(release=offer.number, round=offer.round)
        what = "Back to release" if offer.back else "Now predicting with release"
        log.info("%s %d, the model after round %d.", what, offer.number, offer.round, extra=about)

    def _fine_tune(self, offer: ReleaseOffer) -> None:
        """Fine-tune the current release once, if `offer` asks for this and the owner agrees."""
        current, task = self._pointer.current, f"fine-tuning release {offer.number}"
        if not offer.fine_tune or current is None or not current.is_release(_release(offer)):
            return
        if current.fine_tuned is not None or time.monotonic() < self._postponed.get(task, 0):
            return
        about = f"Release {offer.number} asks for {offer.fine_tune} steps of fine-tuning"
        if self._tune is None:
            self._tell(f"{about}. To agree, the owner starts `run` with --fine-tune.")
            return
        try:
            self._check(offer)
        except TrustError as error:
            self._tell(str(error))
            return
        log.info("%s on the samples of this device.", about)
        last = self._unsent
        before = None if last is None or last.number != offer.number else last.before
        self._send()
        try:
            check_offers(offer.training)
            self._keep_better(offer, current, before, self._tuned(offer, current, task))
        except AuthorisationError:
            raise
        except (EdgeTailorError, RefusedError, OSError) as error:
            # The release itself is installed: do not report that it was refused.
            self._postponed[task] = time.monotonic() + AGAIN_S
            log.warning("Release %d was not fine-tuned: %s", offer.number, error)

    def _tuned(self, offer: ReleaseOffer, current: InstalledRelease, task: str) -> FineTuned:
        """The result of the fine-tuning; an empty one if it cannot succeed on this device."""
        assert self._tune is not None
        try:
            with self._attempts.attempt(task, offer.round):
                return self._tune(offer, self._folder.bundle(current.bundle))
        except (BundleError, DataError, LimitError, UpdateError) as error:
            log.warning("Release %d was not fine-tuned: %s", offer.number, error)
        return FineTuned()

    def _keep_better(
        self,
        offer: ReleaseOffer,
        current: InstalledRelease,
        before: EvaluationCounts | None,
        tuned: FineTuned,
    ) -> None:
        """Switch to the better one of the release and its fine-tuned model, in one atomic write."""
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
        self._write(replace(self._pointer, current=fine_tuned, unsent=_encoded(report)))
        shutil.rmtree(self._folder.scratch, ignore_errors=True)
        log.info("The %s model is better.", "fine-tuned" if sha256 else "released")

    @property
    def _present(self) -> Path | None:
        """The bundle with which this device predicts now: a release or a training bundle."""
        current = self._pointer.current
        if current is not None:  # without fine-tuning, as the offered release
            return self._folder.bundle(current.bundle)
        return self._received if (self._received / MANIFEST).exists() else None

    def _report(
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
            runs=self._pointer.runs if code else offer.number,
            code=code,
            reason=reason,
            before=trial.before if trial is not None and asked else None,
            after=trial.after if trial is not None and asked else None,
        )

    def _switch(
        self, release: InstalledRelease | None, offer: ReleaseOffer, report: ReleaseReport
    ) -> None:
        """Switch to `release`, in one atomic write."""
        current, previous = self._pointer.current, self._pointer.previous
        if offer.back:
            previous = None
        elif current is not None and release is not None and current.bundle != release.bundle:
            previous = current
        self._write(
            replace(
                self._pointer,
                current=release,
                previous=previous,
                issued=offer.issued,
                unsent=_encoded(report),
            )
        )

    def _leave_withdrawn(self, offer: ReleaseOffer) -> None:
        """Leave a withdrawn release, but do not take `offer`, which this device refused before."""
        previous = self._pointer.previous
        if previous is not None and previous.number > offer.number:  # withdrawn, too
            previous = None
        runs = 0 if previous is None else previous.number
        trial = TrialResult(reason="this device has refused it before")
        report = replace(self._report(offer, trial), taken=False, runs=runs)
        self._switch(previous, offer, report)
        log.info("Release %d was refused before: back to release %d.", offer.number, report.runs)

    def _refuse(self, offer: ReleaseOffer, report: ReleaseReport) -> None:
        """Refuse the offered release, also after the next start of the agent."""
        log.warning("Release %d was not taken: %s", offer.number, report.reason)
        release = _release(offer)
        assert release is not None
        refused = (*self._pointer.refused, release)[-MOST_REFUSED:]
        self._write(
            replace(self._pointer, refused=refused, issued=offer.issued, unsent=_encoded(report))
        )

    def _postpone(self, offer: ReleaseOffer, error: EdgeTailorError) -> None:
        """Try the offered release again later."""
        self._postponed[manifest_of(offer.files)] = time.monotonic() + AGAIN_S
        log.warning("Release %d was not taken: %s", offer.number, error)
        self._unsent = self._report(offer, error=error)
        if isinstance(error, LimitError | StorageError):
            # What was downloaded must not fill the disk.
            self._folder.remove_others(self._pointer)

    def _send(self) -> None:
        """Send the last report, if the coordinator does not have it yet."""
        if self._unsent is None:
            return
        report = _without_figures(self._unsent) if self._only_sums() else self._unsent
        if self._client.report_release(report):
            self._unsent = None
            if self._pointer.unsent:
                try:
                    self._write(replace(self._pointer, unsent=""))
                except OSError as error:  # the next start of the agent sends it once more
                    log.info("%s", _failure(error))

    def _fetch(self, offer: ReleaseOffer) -> None:
        """Download the missing files. Raises LimitError if the disk has no room for them."""
        missing = self._folder.missing(offer.files)
        if not missing:
            return
        bundle = manifest_of(offer.files)
        # Unfinished downloads of earlier offers must not fill the disk.
        self._folder.remove_others(self._pointer, bundle)
        folder = self._folder.bundle(bundle)
        folder.mkdir(parents=True, exist_ok=True)
        needed, free = self._folder.bytes_to_fetch(offer.files), room(folder)
        if needed > free:
            raise LimitError(
                "Release {number} needs {needed} on the disk with {path}, but only {free} are "
                "free. Free some space; the device tries again in an hour.",
                code="release.no-room",
                number=offer.number,
                needed=format_bytes(needed),
                free=format_bytes(free),
                path=str(folder.parent),
            )
        log.info("Fetching release %d (%s).", offer.number, format_bytes(needed))
        for file in missing:
            self._client.download(file, folder / file.name, patience_s=PATIENCE_S)

    def _write(self, pointer: ReleasePointer) -> None:
        self._folder.write(pointer)
        self._pointer, self._unsent = pointer, _decoded(pointer.unsent)

    def _tell(self, text: str) -> None:
        """Log `text` once, not at every poll."""
        if text != self._told:
            log.warning("%s", text)
        self._told = text


def _release(offer: ReleaseOffer) -> InstalledRelease | None:
    """The release that `offer` offers; None for no release."""
    if not offer.number:
        return None
    bundle = manifest_of(offer.files)
    return InstalledRelease(number=offer.number, round=offer.round, bundle=bundle)


def _failure(error: OSError) -> StorageError:
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
