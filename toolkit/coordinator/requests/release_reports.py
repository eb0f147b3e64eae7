"""Receives the reports of devices about releases."""

import logging

from msgspec.structs import replace

from device_agent.formats.manifest import MANIFEST
from device_agent.formats.protocol.releases import ReleaseReport, check_report
from profiles.errors import UpdateError
from toolkit.coordinator.database.device_registry import Device, label
from toolkit.coordinator.devices.join_validation import TROUBLE_LENGTH, shortened
from toolkit.coordinator.federation_state import FederationState
from toolkit.coordinator.refusals import conflict, unusable_because

logger = logging.getLogger(__name__)

CODE_LENGTH = 64
HASH_LENGTH = 64
REFUSED = "{more} releases were not taken; `edgetailor release FEDERATION` names the devices."


class ReleaseAnswers(FederationState):
    """Handles the reports of devices about releases."""

    def take_release_report(self, device: Device, number: int, report: ReleaseReport) -> None:
        """Record what `device` reports about release `number`. Reports may be repeated.

        Raises:
            RefusalError: 409 if this device is not offered this release or this bundle. 422 for a
                report that cannot be true.
        """
        offer = self.released.offer(device)
        # After a backup was restored, a number may stand for another release.
        answers = offer is not None and (number, report.bundle) == (
            offer.number,
            next((file.sha256 for file in offer.files if file.name == MANIFEST), ""),
        )
        if not answers or report.number != number:
            raise conflict(
                "{device} is not offered release {number} now: ask for work again.",
                code="release.not-offered",
                device=device.id,
                number=number,
            )
        try:
            check_report(report, device.id)
        except UpdateError as error:
            raise unusable_because(error) from None
        kept = _short(report)
        if not kept.taken and self.minute_log.begins(f"{device.id} release {number}", REFUSED):
            text = f"{label(device)} did not take release {number}: {kept.reason} ({kept.code})"
            logger.warning(text)
            self.notify("release-refused", text, device=device.id, release=number)
        self.store.release_reports.note(device.id, kept)
        self.changed.set()


def _short(report: ReleaseReport) -> ReleaseReport:
    """The part of `report` that is kept: texts of limited length, and no counts by class."""
    without = {
        name: counts and replace(counts, classes=None)
        for name, counts in (
            ("before", report.before),
            ("after", report.after),
            ("fine_tuned", report.fine_tuned),
        )
    }
    return replace(
        report,
        bundle=report.bundle[:HASH_LENGTH],
        code=shortened(report.code, CODE_LENGTH),
        reason=shortened(report.reason, TROUBLE_LENGTH),
        **without,
    )
