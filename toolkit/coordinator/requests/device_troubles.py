"""Devices that cannot train, or that stop: no round waits for them."""

import logging

from device_agent.formats.manifest import MANIFEST
from device_agent.formats.protocol.fleet import INELIGIBLE, STOPPED
from device_agent.formats.protocol.rounds import DIVERGED, Fallback, Stopped, SubmodelFailure
from profiles.text_formatting import counted
from toolkit.coordinator.database.device_registry import Device, label
from toolkit.coordinator.devices.join_validation import TROUBLE_LENGTH, shortened
from toolkit.coordinator.federation_state import FederationState

logger = logging.getLogger(__name__)

CODE_LENGTH = 64
"""The most characters of an error code that a device reports."""
TROUBLES = "{more} reports of trouble from {who}."
STOPS = "{who} has stopped {more} times."


class DeviceTroubles(FederationState):
    """Handles the reports of devices that cannot continue."""

    def submodel_failed(self, device: Device, failure: SubmodelFailure) -> Fallback:
        """Record that `device` cannot train its submodel. The open round stops waiting for it.

        From the next round on the device trains the submodel `fallback` of its kind, if the config
        names one. If no other device is in the open round, this round opens again with the
        fallback. Repeating the report changes nothing. If the training diverged, the device keeps
        its submodel.
        """
        fallback, from_ = self.config.kind(device.kind).fallback, device.fallback_from
        diverged = failure.code in DIVERGED
        with self.lock:
            if failure.submodel == self.submodel(device):
                times = counted(failure.failures, "time")
                trouble = f"{failure.submodel} failed {times}: {failure.reason}"
                if diverged and failure.round in (0, self.rounds.round):
                    self.rounds.note_diverged(device.id)
                # This report is newer than the note that a round closed without this device.
                self.activity[device.id].missed = None
                from_ = self.excuse(device, trouble, shrink=not diverged)
        self.changed.set()
        return Fallback(submodel=None if from_ is None else fallback, round=from_ or 0)

    def excuse(self, device: Device, trouble: str, shrink: bool = True) -> int | None:
        """Stop waiting for `device` in the open round because of `trouble`.

        With `shrink` the device gets the fallback of its kind. Returns the first round with the
        fallback, or None. The caller holds the lock.
        """
        from_ = device.fallback_from
        if self.rounds.waits_for(device.id):
            self.store.open_round.note_failure(self.rounds.round, device.id)
        self.rounds.excuse(device.id)
        self.note_reopening()
        if shrink and from_ is None and self.config.kind(device.kind).fallback is not None:
            from_ = self.rounds.round + 1
        trouble = shortened(trouble, TROUBLE_LENGTH)
        self.store.registry.note_trouble(device.id, trouble, from_)
        about = f"{device.id} ({self.submodel(device)})"
        if trouble != device.trouble and self.minute_log.begins(about, TROUBLES):
            logger.warning("%s: %s", label(device), trouble)
        return from_

    def stopped(self, device: Device, stopped: Stopped) -> None:
        """Record that `device` stops. No round waits for it until it asks for work again."""
        reason = shortened(stopped.reason, TROUBLE_LENGTH)
        with self.lock:
            activity = self.activity[device.id]
            activity.state, activity.note = STOPPED, reason
            self.rounds.stop(device.id)
            self.store.stopped.note(device.id, reason)
            self.note_reopening()
            told, activity.told = activity.told, reason
        # A service that restarts and stops for the same reason again is logged only once.
        if reason != told and self.minute_log.begins(device.id, STOPS):
            code = shortened(stopped.code, CODE_LENGTH)
            logger.warning("%s has stopped: %s (%s)", label(device), reason, code)
        self.changed.set()

    def set_aside(self, device: str) -> None:
        """Neither wait for `device` nor select it until its owner's conditions are met.

        The device then asks for work. The caller holds the lock.
        """
        self.activity[device].state = INELIGIBLE
        self.rounds.stop(device)
        self.note_reopening()
        self.changed.set()

    def resume(self, device: Device) -> None:
        """Let rounds wait again for a `device` that had stopped or was paused, also the open round.

        The caller holds the lock.
        """
        bundle = self.bundles.get(self.submodel(device), {})
        failed = device.id in self.store.open_round.failures(self.rounds.round)
        offer = bundle[MANIFEST].sha256 if bundle and not failed else None
        self.rounds.resume(device.id, offer)
        self.activity[device.id].state, self.activity[device.id].note = "waiting", None
        self.store.stopped.forget(device.id)
        self.changed.set()
