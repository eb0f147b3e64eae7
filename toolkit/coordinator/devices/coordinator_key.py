"""The coordinator's key pair, which signs the work that devices train."""

import base64
from dataclasses import replace

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_agent.formats.protocol.joining import Invitation
from device_agent.formats.protocol.key_changes import KeyChange
from device_agent.formats.protocol.releases import ReleaseOffer
from device_agent.formats.protocol.rounds import Work
from device_agent.formats.protocol.secure_sums import SecureMember, group_text
from device_agent.formats.signed_work import (
    card_text,
    invitation_text,
    key_change_text,
    key_fingerprint,
    release_text,
    work_text,
)


class CoordinatorKey:
    """An Ed25519 key pair. Devices store the public key when they join, and trust no other key.

    Attributes:
        public: The public key: 32 raw bytes in base64.
        fingerprint: The fingerprint of the public key. Every join token ends with it.
    """

    def __init__(self, private: Ed25519PrivateKey | None = None) -> None:
        self._private = private or Ed25519PrivateKey.generate()
        raw = self._private.public_key().public_bytes_raw()
        self.public = base64.b64encode(raw).decode()
        self.fingerprint = key_fingerprint(self.public)

    @classmethod
    def from_pem(cls, content: bytes) -> "CoordinatorKey | None":
        """The key in a PEM file with this content; None if the file has no Ed25519 key."""
        try:
            key = serialization.load_pem_private_key(content, password=None)
        except (TypeError, ValueError, UnsupportedAlgorithm):
            return None
        return cls(key) if isinstance(key, Ed25519PrivateKey) else None

    def pem(self) -> bytes:
        """The private key as a PEM file (PKCS #8, not encrypted)."""
        return self._private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )

    def signed(self, work: Work, now: float) -> Work:
        """Return `work` with the time `now`, in seconds since 1970, and a signature of both."""
        issued = replace(work, issued=int(now))
        return replace(issued, signature=self._signature(work_text(issued)))

    def invites(self, invitation: Invitation) -> Invitation:
        """Return `invitation` with the public key and a signature."""
        signature = self._signature(invitation_text(invitation))
        return replace(invitation, key=self.public, signature=signature)

    def group_signature(self, round_: int, members: list[SecureMember]) -> str:
        """The signature of the group of a secure sum, in base64."""
        return self._signature(group_text(round_, members))

    def card_signature(self, card: bytes) -> str:
        """The signature of a model card, in base64; `card` is the content of `card.json`."""
        return self._signature(card_text(card))

    def releases(self, offer: ReleaseOffer) -> ReleaseOffer:
        """Return `offer` with a signature."""
        return replace(offer, signature=self._signature(release_text(offer)))

    def hands_over(self, new: "CoordinatorKey", made: int, until: int) -> KeyChange:
        """The signed change from this key to `new`. Times are in seconds since 1970."""
        change = KeyChange(old=self.public, new=new.public, made=made, until=until)
        return replace(change, signature=self._signature(key_change_text(change)))

    def _signature(self, text: bytes) -> str:
        return base64.b64encode(self._private.sign(text)).decode()
