"""A device's side of one attempt at a sum. Its secrets are only in memory and are used only once.

If the device restarts, a new attempt with new keys begins, so that no mask is used twice.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import numpy as np

from device_agent.formats.protocol.secure_sums import (
    FEWEST,
    SecureKeys,
    SecureMember,
    SecureTerms,
    SecureUnmasking,
    keys_text,
    present_text,
)
from device_agent.formats.signed_work import is_signed
from device_agent.privacy.masks import (
    KEY_BYTES,
    add_mask,
    new_private_key,
    opened,
    own_mask_key,
    pair_mask_key,
    public_key,
    sealed,
)
from device_agent.privacy.secure_group import (
    SecureGroup,
    adds,
    bytes_of,
    has_own_keys,
    text_of,
)
from device_agent.privacy.shamir import split_secret
from profiles.errors import TrustError

Shares = tuple[bytes, bytes]
"""A share of the private mask key, and one of the seed of the device's own mask."""


class SecretSharer:
    """One attempt of one device. Each method is called once, in the order of this class.

    If the coordinator asks for something with which it could learn the update of a device, the
    method raises TrustError. Then the attempt is over, and nothing more may be sent.

    Args:
        device: The device's id.
        sign: Signs a text with the device's key of the join, and returns base64.
        public: The public key of the join, in base64.
        round_: The round.
        bundle: SHA-256 of the manifest that was trained.
        terms: The terms that the coordinator has signed.

    Attributes:
        keys: The keys that the device sends first.
    """

    def __init__(
        self,
        device: str,
        sign: Callable[[bytes], str],
        public: str,
        round_: int,
        bundle: str,
        terms: SecureTerms,
        apart: float = 0.0,
    ) -> None:
        self._device, self._sign, self._public = device, sign, public
        self._round, self._terms, self._apart = round_, terms, apart
        self._mask_key, self._share_key = new_private_key(), new_private_key()
        self._seed = secrets.token_bytes(KEY_BYTES)
        mask_key, share_key = (
            text_of(public_key(key)) for key in (self._mask_key, self._share_key)
        )
        signature = sign(keys_text(round_, bundle, terms, apart, mask_key, share_key))
        self.keys = SecureKeys(
            bundle=bundle, mask_key=mask_key, share_key=share_key, signature=signature
        )
        self._group: SecureGroup | None = None
        self._held: dict[str, Shares] = {}
        self._is_masked = False
        self._present: set[str] | None = None

    def shares(self, members: Sequence[SecureMember]) -> dict[str, str]:
        """Check the group, and make the encrypted shares for the neighbours."""
        if self._group is not None:
            _refuse("it asked twice for the shares of the same attempt")
        self._check_members(members)
        self._group = group = SecureGroup(self._round, members)
        holders, needed = group.holders(self._device), group.needed(self._device)
        keys = split_secret(self._mask_key, needed, len(holders))
        seeds = split_secret(self._seed, needed, len(holders))
        sent = {}
        for holder, key, seed in zip(holders, keys, seeds, strict=True):
            if holder == self._device:
                self._held[holder] = key, seed
                continue
            way = f"{self._device}\n{holder}"
            sent[holder] = text_of(
                sealed(self._share_key, self._share_key_of(holder), group.context, way, key + seed)
            )
        return sent

    def masked(self, shares: Mapping[str, str], vector: np.ndarray) -> np.ndarray:
        """Add the masks to `vector`, uint32 (elements,), in place. Returns `vector`.

        `shares` are the shares that the neighbours have sent.
        """
        group = self._ready()
        if self._is_masked:
            _refuse("it asked twice for the update of the same attempt")
        neighbours = set(group.neighbours(self._device))
        if not shares.keys() <= neighbours:
            _refuse("it passed on shares of devices that are not neighbours of this device")
        for sender, content in shares.items():
            self._held[sender] = self._opened(sender, content)
        if len(self._held) < group.needed(self._device):
            _refuse(
                f"only {len(self._held)} devices have shares of each other, but "
                f"{group.needed(self._device)} are needed to remove the masks"
            )
        self._is_masked = True
        add_mask(vector, own_mask_key(self._seed, group.context))
        for neighbour in shares:
            theirs = bytes_of(group.members[neighbour].keys.mask_key)
            key = pair_mask_key(self._mask_key, theirs, group.context)
            add_mask(vector, key, subtract=not adds(self._device, neighbour))
        return vector

    def confirmed(self, present: Sequence[str]) -> str:
        """Check the list of devices whose updates have arrived, and sign the list."""
        group = self._ready()
        if not self._is_masked:
            _refuse("it named the devices in the sum before this device had sent its update")
        if self._present is not None and self._present != set(present):
            _refuse("it named other devices in the sum than before")
        self._check_present(group, present)
        self._present = set(present)
        return self._sign(present_text(group.context, list(present)))

    def unmasking(
        self, present: Sequence[str], confirmations: Mapping[str, str]
    ) -> SecureUnmasking:
        """The shares with which the masks of the sum over `present` can be removed.

        The result has a share of only one secret of each device. If the device's update is in the
        sum, this secret is the seed of the device's own mask. Otherwise it is the device's mask
        key. This device never gives a share of its own mask key.
        """
        group = self._ready()
        if self._present is None or self._present != set(present):
            _refuse(
                "it asked for shares for another sum than the one that the devices have confirmed"
            )
        text = present_text(group.context, list(present))
        signers = {
            device
            for device, signature in confirmations.items()
            if device in group.members and is_signed(group.members[device].key, signature, text)
        }
        if len(signers) < group.confirmations:
            _refuse(
                f"only {len(signers)} devices of the group have confirmed the same sum, but "
                f"{group.confirmations} are needed"
            )
        gone = self._held.keys() - self._present
        here = self._held.keys() & self._present
        return SecureUnmasking(
            seeds={device: text_of(self._held[device][1]) for device in sorted(here)},
            keys={device: text_of(self._held[device][0]) for device in sorted(gone)},
        )

    def _ready(self) -> SecureGroup:
        if self._group is None:
            _refuse("it left out the list of the group")
        return self._group

    def _share_key_of(self, device: str) -> bytes:
        assert self._group is not None
        return bytes_of(self._group.members[device].keys.share_key)

    def _opened(self, sender: str, content: str) -> Shares:
        group = self._ready()
        theirs, way = self._share_key_of(sender), f"{sender}\n{self._device}"
        try:
            encrypted = bytes_of(content)
        except ValueError:
            encrypted = b""
        plain = opened(self._share_key, theirs, group.context, way, encrypted)
        if plain is None or len(plain) != 2 * KEY_BYTES:
            _refuse(f"the shares of {sender} were altered, or made for another group")
        return plain[:KEY_BYTES], plain[KEY_BYTES:]

    def _check_members(self, members: Sequence[SecureMember]) -> None:
        fewest = max(self._terms.fewest, FEWEST)
        if len(members) < fewest:
            _refuse(f"the group has {len(members)} devices, but it needs {fewest}")
        own = [member for member in members if member.device == self._device]
        if [(member.key, member.keys) for member in own] != [(self._public, self.keys)]:
            _refuse("the keys of this device are missing from the group, or were changed")
        named = [
            value
            for member in members
            for value in (
                member.device,
                member.key,
                member.keys.mask_key,
                member.keys.share_key,
            )
        ]
        if len(set(named)) < len(named):
            _refuse("the group has a device or a key twice")
        for member in members:
            if not has_own_keys(member, self._round, self.keys.bundle, self._terms, self._apart):
                _refuse(
                    f"{member.device} has not signed its keys for this round, bundle and terms, "
                    "or these keys cannot be used"
                )

    def _check_present(self, group: SecureGroup, present: Sequence[str]) -> None:
        fewest = max(self._terms.fewest, FEWEST)
        named = set(present)
        if len(named) < len(present) or not named <= group.members.keys():
            _refuse("the sum has a device twice, or a device that is not in the group")
        if self._device not in named:
            _refuse("the sum leaves out the update that this device has sent")
        if len(named) < fewest:
            _refuse(f"the sum has {len(named)} devices, but it needs {fewest}")


def _refuse(why: str) -> NoReturn:
    raise TrustError(
        "This device has left the secure sum of the round, because the coordinator broke a rule: "
        "{why}. The update was not revealed. If this happens again, ask the operator.",
        code="trust.unsafe-sum",
        why=why,
    )
