"""The device's key pair. The device generates it; the public key identifies the device."""

import base64
import hashlib
from collections.abc import Mapping
from typing import Any, Self

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_agent.formats.protocol.joining import (
    JoinRequest,
    NewSecret,
    join_text,
    secret_text,
)
from device_agent.system.clock import SYSTEM_CLOCK, Clock
from profiles.errors import InputError


class DeviceKey:
    """An Ed25519 key pair."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private

    @classmethod
    def new(cls) -> Self:
        """Generate a key pair."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_pem(cls, data: bytes, path: object) -> Self:
        """Read a key from a PEM file.

        Args:
            data: Content of the file.
            path: The file, for the error message.

        Raises:
            InputError: The content is not an Ed25519 private key.
        """
        try:
            key = serialization.load_pem_private_key(data, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            key = None
        if not isinstance(key, Ed25519PrivateKey):
            raise InputError(
                "{path} is damaged: it has no Ed25519 key. If you remove the file, this machine "
                "can join as a new device.",
                code="state.damaged-key",
                path=str(path),
            )
        return cls(key)

    def pem(self) -> bytes:
        """The private key as a PEM file (PKCS #8, not encrypted)."""
        return self._private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )

    @property
    def public(self) -> str:
        """The public key: 32 raw bytes in base64."""
        raw = self._private.public_key().public_bytes_raw()
        return base64.b64encode(raw).decode()

    def signature(self, text: bytes) -> str:
        """The signature of `text`, in base64."""
        return base64.b64encode(self._private.sign(text)).decode()

    def join_request(
        self,
        token: str,
        name: str,
        machine: Mapping[str, str | int | None],
        profile: dict[str, Any] | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> JoinRequest:
        """Make a join request, signed with the current time.

        Args:
            token: The join token.
            name: Name of the device.
            machine: Description of the machine.
            profile: Measured profile of the device, if the coordinator asked for it.
            clock: The device's clock.
        """
        timestamp = int(clock.now())
        return JoinRequest(
            name=name,
            public_key=self.public,
            machine=dict(machine),
            timestamp=timestamp,
            signature=self.signature(join_text(token, self.public, timestamp)),
            profile=profile,
        )

    def new_secret(self, challenge: str, secret: str) -> NewSecret:
        """Make the answer to a `challenge` of the coordinator: the signed hash of a new secret."""
        digest = hashlib.sha256(secret.encode()).hexdigest()
        return NewSecret(
            challenge=challenge,
            secret_sha256=digest,
            signature=self.signature(secret_text(challenge, digest)),
        )
