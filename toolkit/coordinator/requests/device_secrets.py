"""Devices make new secrets when the operator has asked for them."""

import logging
from functools import partial
from hmac import compare_digest
from secrets import token_urlsafe

from device_agent.formats.protocol.joining import NewSecret, secret_text
from device_agent.formats.signed_work import is_signed
from toolkit.coordinator.database import secret_log
from toolkit.coordinator.database.device_registry import Device, hashed, label
from toolkit.coordinator.federation_state import FederationState
from toolkit.coordinator.refusals import conflict, unusable

logger = logging.getLogger(__name__)


class DeviceSecrets(FederationState):
    """Replaces the secrets of devices."""

    def new_secret(self, device: Device) -> str:
        """The challenge that `device` must answer with a new secret; empty if there is none."""
        due = self.secrets_due.get(device.id)
        return "" if due is None else due.challenge

    def take_secret(self, device: Device, new: NewSecret) -> None:
        """Replace the secret of `device`, which was asked for a new one. The old secret is void.

        Raises:
            RefusalError: 409 if the device was not asked, 422 if the signature is wrong or the
                secret is in use.
        """
        with self.lock:
            due = self.secrets_due.get(device.id)
            if due is None or not compare_digest(due.challenge.encode(), new.challenge.encode()):
                raise conflict(
                    "The coordinator did not ask {device} for this new secret: ask for work again.",
                    code="secret.not-asked",
                    device=device.id,
                )
            text = secret_text(new.challenge, new.secret_sha256)
            if not is_signed(device.public_key, new.signature, text):
                raise unusable(
                    "The new secret must be signed with the key that {device} joined with.",
                    code="secret.bad-signature",
                    device=device.id,
                )
            if self.store.registry.device_with_hash(new.secret_sha256) is not None:
                raise unusable("This secret is in use: make another one.", code="secret.used")
            self._replace_secret(device, new.secret_sha256)
        logger.info("%s has a new secret.", label(device))

    def void_late_secrets(self) -> None:
        """Void the secrets of devices that made no new secret in time. They must join again."""
        now = self.wall_clock()
        if all(now <= due.until for due in self.secrets_due.values()):
            return
        with self.lock:
            for name in [name for name, due in self.secrets_due.items() if now > due.until]:
                device = self.store.registry.device(name)
                self._replace_secret(device, hashed(token_urlsafe(32)))
                logger.warning(
                    "%s made no new secret in time, and its old one is void: it has to join again.",
                    label(device),
                )

    def forget_due_secret(self, device: Device) -> None:
        """Stop asking `device` for a new secret. The caller holds the lock."""
        if device.id in self.secrets_due:
            due = {name: other for name, other in self.secrets_due.items() if name != device.id}
            self.store.set_value(secret_log.DUE_SECRETS, secret_log.encoded(due))
            self.secrets_due = due

    def _replace_secret(self, device: Device, secret_hash: str) -> None:
        due = {name: other for name, other in self.secrets_due.items() if name != device.id}
        write = partial(secret_log.write, due=due)
        self.store.registry.set_secret(device.id, secret_hash, write)
        self.secrets_due = due
