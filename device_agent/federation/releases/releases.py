"""Follows the coordinator's offers of releases while the device has nothing to train."""

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.client.replies import RefusedError
from device_agent.federation.offered_files import check_offers, manifest_of
from device_agent.federation.release_folder import DeviceReleases, InstalledRelease
from device_agent.federation.releases.release_attempts import ReleaseAttempts
from device_agent.federation.releases.release_outcomes import (
    NOTHING,
    ReleaseOutcomes,
    offered_release,
    storage_failure,
)
from device_agent.formats.evaluation_counts import EvaluationRequest
from device_agent.formats.manifest import MANIFEST
from device_agent.formats.protocol.releases import ReleaseOffer
from device_agent.formats.signed_work import check_release
from device_agent.inference.fine_tuning import FineTuned
from device_agent.inference.release_trial import TrialResult
from device_agent.log_format import fields
from device_agent.system.disk_space import room
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
from profiles.text_formatting import format_bytes

log = logging.getLogger(__name__)
PATIENCE_S = 60.0
"""How long the download of a release's file is tried, in seconds. Rounds must not wait for it."""
AGAIN_S = 3600.0
"""Seconds until a release is tried again, if it could not be downloaded, or if the disk or the
memory was too small for it."""
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
        check_signed: Calls a check with the coordinator's public key, like `TrustedKey.check`.
        trial: Compares a release with the present model.
        tune: Fine-tunes a release; None if the owner has not agreed to fine-tuning.
        only_sums: Whether reports must not contain figures of this device. This is so if the
            federation uses secure sums or differential privacy for samples.
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
        self._check_signed, self._trial, self._tune = check_signed, trial, tune
        self._outcomes = ReleaseOutcomes(folder, client, only_sums)
        self._postponed: dict[str, float] = {}
        self._verified, self._told, self._earlier = "", "", 0
        self._attempts = ReleaseAttempts(folder.attempts)

    def follow(self, offer: ReleaseOffer | None) -> None:
        """Do what `offer` asks for, unless it is already done, and report the result.

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
                self._postpone(offer, storage_failure(error))
            self._fine_tune(offer)
        self._outcomes.send()

    def _follow(self, offer: ReleaseOffer) -> None:
        """Fetch, try and report the offered release, unless that is done already."""
        if self._is_answered(offer):
            return
        self._check(offer)
        try:
            self._install(offer)
        except BundleError as error:
            self._outcomes.refuse(offer, self._outcomes.report(offer, error=error))

    def _is_answered(self, offer: ReleaseOffer) -> bool:
        """Whether this device has already done what `offer` asks for, or has postponed it."""
        current, release = self._outcomes.pointer.current, offered_release(offer)
        if current is None or release is None:
            if current is release:
                return True
        elif current.is_release(release):
            return self._verify(offer)
        if current is not None and offer.number < current.number and not offer.back:
            self._keep_later(offer, current)
            return True
        refused = release in self._outcomes.pointer.refused and not self._goes_back(offer)
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
        self._outcomes.report_later_release(offer, reason)

    def _goes_back(self, offer: ReleaseOffer) -> bool:
        """Whether this device has to go back to `offer`, because a later release was withdrawn.

        False if the device does not have a later release.
        """
        return offer.back and self._outcomes.pointer.runs > offer.number

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
        if offer.issued < self._outcomes.pointer.issued:
            raise TrustError(
                "The offer of release {number} is older than the newest offer that this device has "
                "handled. Somebody may have sent an old message again. Nothing was changed.",
                code="trust.old-release",
                number=offer.number,
                issued=offer.issued,
                newest=self._outcomes.pointer.issued,
            )

    def _install(self, offer: ReleaseOffer) -> None:
        """Fetch and try the offered release.

        Switch to it unless it is worse than the present model.
        """
        release, current = offered_release(offer), self._outcomes.pointer.current
        if release is None:
            self._outcomes.switch(None, offer, NOTHING)
            log.info("All releases were withdrawn: this device has no release any more.")
            return
        if release in self._outcomes.pointer.refused:
            self._outcomes.leave_withdrawn(offer)
            return
        check_offers(offer.files)
        self._fetch(offer)
        report = self._outcomes.report(offer)
        # A model may be released again.
        present = None if current is None else current.bundle
        if not self._goes_back(offer) and present != release.bundle:
            with self._attempts.attempt(f"trying release {offer.number}", offer.round):
                trial = self._trial(
                    self._folder.bundle(release.bundle), self._present, offer.evaluation
                )
            report = self._outcomes.report(offer, trial)
            if trial.reason is not None:
                self._outcomes.refuse(offer, report)
                return
        self._outcomes.switch(release, offer, report)
        about = fields(release=offer.number, round=offer.round)
        what = "Back to release" if offer.back else "Now predicting with release"
        log.info("%s %d, the model after round %d.", what, offer.number, offer.round, extra=about)

    def _fine_tune(self, offer: ReleaseOffer) -> None:
        """Fine-tune the current release once, if `offer` asks for this and the owner agrees."""
        current, task = self._outcomes.pointer.current, f"fine-tuning release {offer.number}"
        if not offer.fine_tune or current is None or not current.is_release(offered_release(offer)):
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
        before = self._outcomes.unsent_before(offer)
        self._outcomes.send()
        try:
            check_offers(offer.training)
            tuned = self._tuned(offer, current, task)
            self._outcomes.keep_better(offer, current, before, tuned)
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

    @property
    def _present(self) -> Path | None:
        """The bundle with which this device predicts now: a release or a training bundle."""
        current = self._outcomes.pointer.current
        if current is not None:  # without fine-tuning, as the offered release
            return self._folder.bundle(current.bundle)
        return self._received if (self._received / MANIFEST).exists() else None

    def _postpone(self, offer: ReleaseOffer, error: EdgeTailorError) -> None:
        """Try the offered release again later."""
        self._postponed[manifest_of(offer.files)] = time.monotonic() + AGAIN_S
        log.warning("Release %d was not taken: %s", offer.number, error)
        self._outcomes.fail(offer, error)
        if isinstance(error, LimitError | StorageError):
            # What was downloaded must not fill the disk.
            self._folder.remove_others(self._outcomes.pointer)

    def _fetch(self, offer: ReleaseOffer) -> None:
        """Download the missing files. Raises LimitError if the disk has no room for them."""
        missing = self._folder.missing(offer.files)
        if not missing:
            return
        bundle = manifest_of(offer.files)
        # Unfinished downloads of earlier offers must not fill the disk.
        self._folder.remove_others(self._outcomes.pointer, bundle)
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

    def _tell(self, text: str) -> None:
        """Log `text` once, not at every poll."""
        if text != self._told:
            log.warning("%s", text)
        self._told = text
