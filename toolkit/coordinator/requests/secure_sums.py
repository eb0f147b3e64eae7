"""Receives the messages of devices for a round's secure sum, which replaces single updates."""

from dataclasses import replace

from device_agent.formats.manifest import MANIFEST
from device_agent.formats.protocol.problems import ROUND_CLOSED, UNSIGNED_KEYS
from device_agent.formats.protocol.secure_sums import (
    SecureConfirmation,
    SecureInput,
    SecureKeys,
    SecureMember,
    SecureShares,
    SecureStep,
    SecureUnmasking,
    Step,
)
from device_agent.privacy.secret_sum import SecretSum
from device_agent.privacy.secure_group import has_own_keys
from device_agent.privacy.summed_updates import elements
from toolkit.coordinator.database.device_registry import Device
from toolkit.coordinator.federation_state import FederationState
from toolkit.coordinator.refusals import RefusalError, conflict, unusable
from toolkit.coordinator.rounds.poll_interval import LONGEST_S
from toolkit.coordinator.rounds.upload_validation import expected_tensors

COMES = "secure sum"
"""Stands for the hash of an update: in a secure sum, a device's keys count as its update. Until the
round closes, the keys may be replaced, for example after a restart of the device."""
ASK_AGAIN_S = 0.25
"""How soon a device of a small fleet asks again for its next step, in seconds."""
REQUESTS_PER_S, WAITING_PER_S = 200, 40
"""The most requests per second of all devices that wait for their next step, and of all devices
that wait for the end of the round."""


class SecureSums(FederationState):
    """Receives the messages of devices for secure sums."""

    def secure_keys(self, device: Device, round_: int, keys: SecureKeys) -> None:
        """Take the keys of a device that has trained. A later call replaces them.

        Raises RefusalError: 409 if the round takes no keys from this device; 422 for unusable keys.
        """
        member = SecureMember(device=device.id, key=device.public_key, keys=keys)
        terms, apart = self.secure_terms, self.config.evaluation.share
        if terms is None or not has_own_keys(member, round_, keys.bundle, terms, apart):
            raise unusable(
                "{device} has not signed these keys for round {round} with its own key, or they "
                "cannot be used.",
                code=UNSIGNED_KEYS,
                device=device.id,
                round=round_,
            )
        with self.lock:
            sums = self.sums
            self.rounds.check(device.id, round_, keys.bundle, COMES)
            if sums is None or not sums.offer(self.submodel(device), member):
                raise self._without(device, round_)
            self.rounds.take(device.id, round_, keys.bundle, COMES)
            activity = self.activity[device.id]
            activity.missed = activity.told = None
        self.changed.set()

    def secure_step(self, device: Device, round_: int) -> SecureStep:
        """The next step of `device` in the sum of `round_`."""
        with self.lock:
            known = None if self.sums is None else self.sums.step_of(device.id, round_)
            if known is not None:
                return self._paced(known)
            if self.sums is None or round_ != self.rounds.done + 1:
                return SecureStep(step="over", round=round_)
            if self.rounds.waits_for(device.id):
                return SecureStep(step="again", round=round_)
            opens = self.rounds.phase in ("enrolling", "aggregating") and not self.rounds.updates
            return self._paced(SecureStep(step="wait" if opens else "over", round=round_))

    def secure_shares(self, device: Device, round_: int, message: SecureShares) -> None:
        """Take the shares of `device` for its neighbours."""
        with self.lock:
            own = self._expecting(device, round_, "shares")
            if not own.take_shares(device.id, dict(message.shares)):
                raise unusable(
                    "{device} has to send one share to each of its neighbours in the sum.",
                    code="round.other-neighbours",
                    device=device.id,
                )
        self.changed.set()

    def secure_input(self, device: Device, round_: int, message: SecureInput) -> None:
        """Take the masked update of `device`, which was sent as tensors."""
        with self.lock:
            self._expecting(device, round_, "input")
            manifest = self._manifest(device)
        size = 4 * elements(expected_tensors(manifest))
        came = self.store.upload(device.id)
        if came != message.sha256 or not self.store.blobs.has_size(came, size):
            raise conflict(
                "The masked update of {device} must have {size} bytes, and must be sent before its "
                "hash.",
                code="round.no-masked-update",
                device=device.id,
                size=size,
            )
        with self.lock:
            self._expecting(device, round_, "input").take_input(device.id)
        self.changed.set()

    def secure_confirmation(self, device: Device, round_: int, message: SecureConfirmation) -> None:
        """Take the signature of the list of devices in the sum."""
        with self.lock:
            own = self._expecting(device, round_, "confirm")
            if not own.take_confirmation(device.id, message.signature):
                raise unusable(
                    "{device} has not signed the list of devices in its sum.",
                    code="round.unconfirmed-sum",
                    device=device.id,
                )
        self.changed.set()

    def secure_unmasking(self, device: Device, round_: int, message: SecureUnmasking) -> None:
        """Take the shares with which the masks are removed."""
        with self.lock:
            self._expecting(device, round_, "unmask").take_unmasking(device.id, message)
        self.changed.set()

    def check_masked_upload(self, device: Device, round_: int) -> None:
        """Raise RefusalError (409) unless `device` may send its masked update now.

        The caller holds the lock.
        """
        self._expecting(device, round_, "input")

    def _expecting(self, device: Device, round_: int, step: Step) -> SecretSum:
        """The secure sum in which `device` may now answer `step`.

        Raises RefusalError (409) if there is none.
        """
        own = None if self.sums is None else self.sums.expecting(device.id, step)
        if own is None or round_ != self.rounds.round:
            raise self._without(device, round_)
        return own

    def _without(self, device: Device, round_: int) -> RefusalError:
        return conflict(
            "The secure sum of round {round} takes nothing from {device} now: it continues without "
            "this device. An agent that sent a plain update is too old for this federation.",
            code=ROUND_CLOSED,
            round=round_,
            device=device.id,
        )

    def _paced(self, step: SecureStep) -> SecureStep:
        if step.step != "wait":
            return step
        begun = self.sums is not None and self.sums.has_begun
        rate = REQUESTS_PER_S if begun else WAITING_PER_S
        soon = min(max(ASK_AGAIN_S, len(self.rounds.devices) / rate), LONGEST_S)
        return replace(step, ask_again_s=soon)

    def _manifest(self, device: Device) -> bytes:
        """The manifest of the bundle that `device` trains. The caller holds the lock."""
        entry = self.offered_bundle(device)[MANIFEST]
        return self.store.blobs.path(entry.sha256).read_bytes()
