"""The device's key pair: made on the device, and its public half is who the device is."""

import base64
import time
from collections.abc import Mapping
from typing import Any, Self

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_agent.formats.protocol import JoinRequest, join_text
from profiles.errors import InputError


class DeviceKey:
    """An Ed25519 private key."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private

    @classmethod
    def new(cls) -> Self:
        """A key that nobody else has."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_pem(cls, data: bytes, place: object) -> Self:
        """The key in a PEM file. Raises InputError, naming `place`, for anything else."""
        try:
            key = serialization.load_pem_private_key(data, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            key = None
        if not isinstance(key, Ed25519PrivateKey):
            raise InputError(
                f"{place} is damaged: it holds no Ed25519 key. Remove it, and this machine joins "
                "as a new device."
            )
        return cls(key)

    def pem(self) -> bytes:
        """The key as a PEM file (PKCS #8, not encrypted)."""
        return self._private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )

    @property
    def public(self) -> str:
        """The public half: 32 raw bytes in base64."""
        raw = self._private.public_key().public_bytes_raw()
        return base64.b64encode(raw).decode()

    def join_request(
        self,
        token: str,
        name: str,
        machine: Mapping[str, str | int | None],
        profile: dict[str, Any] | None = None,
    ) -> JoinRequest:
        """A request to join with `token`, signed now."""
        timestamp = int(time.time())
        signature = self._private.sign(join_text(token, self.public, timestamp))
        return JoinRequest(
            name=name,
            public_key=self.public,
            machine=dict(machine),
            timestamp=timestamp,
            signature=base64.b64encode(signature).decode(),
            profile=profile,
        )
