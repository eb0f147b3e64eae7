"""Adds the update of a device to the secure sum of its round, instead of sending the update."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.client.replies import RefusedError
from device_agent.federation.device_state import DeviceState
from device_agent.federation.identity.device_keys import DeviceKey
from device_agent.federation.identity.trusted_key import TrustedKey
from device_agent.federation.polling import Polling
from device_agent.formats.atomic_files import fingerprint
from device_agent.formats.manifest import WEIGHTS
from device_agent.formats.protocol.problems import UNSIGNED_KEYS
from device_agent.formats.protocol.rounds import Work
from device_agent.formats.protocol.secure_sums import (
    SecureConfirmation,
    SecureInput,
    SecureShares,
    SecureStep,
    SecureTerms,
)
from device_agent.formats.signed_work import check_group
from device_agent.formats.tensor_files import read_tensors
from device_agent.formats.update import read_update
from device_agent.log_format import fields
from device_agent.privacy.secret_sharer import SecretSharer
from device_agent.privacy.summed_updates import update_vector
from device_agent.training.batching import round_seed

log = logging.getLogger(__name__)
NEW_TERMS_S = 30.0
"""How long a device waits if the coordinator has other terms than the device, in seconds."""


def kept_apart(work: Work) -> float:
    """The share of samples that devices use only to judge models."""
    return 0.0 if work.evaluation is None else work.evaluation.share


class SecureSending(NamedTuple):
    """What a device needs for secure sums.

    Attributes:
        folder: The state folder.
        client: Makes the device's requests.
        key: The coordinator's key, which signs groups.
        rest: Waits for a number of seconds.
        seed: The seed of the device's trainings. The seed also determines how numbers are rounded.
    """

    folder: DeviceState
    client: CoordinatorClient
    key: TrustedKey
    rest: Callable[[float], None]
    seed: int

    def add(self, work: Work) -> bool:
        """Add the update in the state folder to the sum of the round of `work`.

        Returns:
            Whether the update is in the sum, as far as the device knows. If the coordinator repeats
            the sum after the masked update was sent, the result is False, and the device trains
            again.

        Raises:
            RefusedError: The round continued without this device.
            TrustError: The coordinator asked for something that could reveal the update.
        """
        try:
            while (is_added := self._attempt(work)) is None:
                log.info("Round %d: the secure sum is repeated with new keys", work.round)
            if not is_added:
                text = "Round %d continued without this device, or the device trains again."
                log.info(text, work.round, extra=fields(round=work.round))
            return is_added
        finally:
            self.folder.masked.unlink(missing_ok=True)

    def _attempt(self, work: Work) -> bool | None:
        """One attempt with new keys. Returns None if it has to be repeated with this update."""
        assert work.secure is not None
        bundle = read_update(self.folder.update)[0].bundle
        own = DeviceKey.from_pem(self.folder.key.read_bytes(), self.folder.key)
        device = self.folder.member().device
        sharer = SecretSharer(
            device,
            own.signature,
            own.public,
            work.round,
            bundle,
            work.secure,
            kept_apart(work),
        )
        try:
            self.client.send_to_sum(work.round, sharer.keys)
        except RefusedError as refusal:
            if refusal.code != UNSIGNED_KEYS:
                raise
            # The keys are signed for these terms. After a restart, the coordinator may have other
            # terms.
            log.warning("Round %d: %s Asking for the work again.", work.round, refusal)
            self.rest(NEW_TERMS_S)
            return False
        members, polling = 0, Polling(self.rest)
        while True:
            step = self.client.secure_step(work.round)
            if step.step == "wait":
                polling.wait(step.ask_again_s)
            elif step.step == "shares":
                self.key.check(partial(check_group, step))
                shares, members = sharer.shares(step.members), len(step.members)
                self.client.send_to_sum(work.round, SecureShares(shares=shares))
            elif step.step == "input":
                self._send_masked(work.round, sharer, step, work.secure, members)
            elif step.step == "confirm":
                confirmed = SecureConfirmation(signature=sharer.confirmed(step.present))
                self.client.send_to_sum(work.round, confirmed)
            elif step.step == "unmask":
                shared = sharer.unmasking(step.present, step.confirmations)
                self.client.send_to_sum(work.round, shared)
                return True
            else:
                unsent = self.folder.update.exists()
                return None if step.step == "again" and unsent else False

    def _send_masked(
        self,
        round_: int,
        sharer: SecretSharer,
        step: SecureStep,
        terms: SecureTerms,
        members: int,
    ) -> None:
        record, trained = read_update(self.folder.update)
        received: Mapping[str, np.ndarray] = read_tensors(
            self.folder.bundle / WEIGHTS, [entry.name for entry in record.tensors]
        )
        # Devices may have the same seed, but their roundings must differ.
        seed = [round_seed(self.seed, round_), *self.folder.member().device.encode()]
        vector = update_vector(record, trained, received, terms, members, seed)
        data = sharer.masked(step.shares, vector).astype("<u4", copy=False).tobytes()
        self.folder.masked.write_bytes(data)
        self.folder.use_up_update(round_)
        self.client.send_tensors(round_, self.folder.masked)
        sent = SecureInput(sha256=fingerprint(data).sha256)
        self.client.send_to_sum(round_, sent)
