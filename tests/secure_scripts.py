"""Scripts of secure sums: what a coordinator asks of a device, and what an agent answers.

The random draws of the device are given. So a page must answer with the same bytes as an agent, and
refuse with the same sentence.
"""

import random
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_agent.federation.identity.device_keys import DeviceKey
from device_agent.formats.protocol.secure_sums import SecureMember, SecureTerms, keys_text
from device_agent.privacy import secret_sharer
from device_agent.privacy.secret_sharer import SecretSharer
from device_agent.privacy.secure_group import text_of
from profiles.errors import TrustError

Script = list[list[Any]]
"""Calls of a SecretSharer: the name of the method, then JSON values."""
DEVICES, FEWEST, ELEMENTS = 5, 4, 300
DRAWS = 3 + 2 * 2
"""Two private keys, a seed, and the random rows of two secrets with the threshold 3."""


@contextmanager
def drawing(draws: Sequence[str]) -> Iterator[None]:
    """Give these 32 bytes each, in hexadecimal, in place of random ones."""
    left = iter(draws)

    def draw(size: int = 32) -> bytes:
        drawn = bytes.fromhex(next(left))
        assert len(drawn) == size
        return drawn

    with (
        patch.object(secrets, "token_bytes", draw),
        patch.object(secret_sharer, "new_private_key", draw),
    ):
        yield


def sharer(device: Mapping[str, Any]) -> SecretSharer:
    """The agent's side of an attempt of `device`."""
    key = DeviceKey(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(device["private"])))
    terms = msgspec.convert(device["terms"], SecureTerms)
    assert key.public == device["key"]
    return SecretSharer(
        device["device"],
        key.signature,
        key.public,
        device["round"],
        device["bundle"],
        terms,
        device["apart"],
    )


def _masked(own: SecretSharer, shares: dict[str, str], vector: str) -> str:
    numbers = np.frombuffer(bytes.fromhex(vector), "<u4").astype(np.uint32)
    return own.masked(shares, numbers).astype("<u4").tobytes().hex()


CALLS: dict[str, Callable[..., Any]] = {
    "shares": lambda own, members: own.shares(msgspec.convert(members, list[SecureMember])),
    "masked": _masked,
    "confirmed": SecretSharer.confirmed,
    "unmasking": lambda *given: msgspec.to_builtins(SecretSharer.unmasking(*given)),
}


def answers(device: Mapping[str, Any], script: Script) -> list[Any]:
    """The keys of an agent, and its answer to each call; a refusal is its sentence."""
    with drawing(device["draws"]):
        own = sharer(device)
        found: list[Any] = [msgspec.to_builtins(own.keys)]
        for call, *given in script:
            try:
                found.append(CALLS[call](own, *given))
            except TrustError as refusal:
                found.append({"refused": str(refusal)})
    return found


class World:
    """A device with given draws in a group of DEVICES. The last one is lost after its shares.

    Attributes:
        device: The device, as JSON.
        members: The group, as the coordinator lists it.
        received: The shares for the device, by sender.
        vector: The update of the device, in hexadecimal.
        present: The devices whose updates have come.
        confirmations: Their signatures of `present`.
    """

    def __init__(self, draw: random.Random) -> None:
        private = draw.randbytes(32)
        key = DeviceKey(Ed25519PrivateKey.from_private_bytes(private))
        self.terms = SecureTerms(fewest=FEWEST, most_change=0.1234565, most_samples=100)
        self.device = {
            "device": "device-0",
            "private": private.hex(),
            "key": key.public,
            "draws": [draw.randbytes(32).hex() for _ in range(DRAWS)],
            "round": draw.randrange(1, 1000),
            "bundle": draw.randbytes(32).hex(),
            "terms": msgspec.to_builtins(self.terms),
            "apart": 0.07,
        }
        others = [self.other(number) for number in range(1, DEVICES)]
        with drawing(self.device["draws"]):
            own = sharer(self.device)
            offers = [(key.public, "device-0", own), *others]
            self.members = [
                SecureMember(device=device, key=public, keys=one.keys)
                for public, device, one in offers
            ]
            sent = own.shares(self.members)
        shares = {device: one.shares(self.members) for _, device, one in others}
        self.received = {device: given["device-0"] for device, given in shares.items()}
        shares["device-0"] = sent
        self.vector = draw.randbytes(4 * ELEMENTS).hex()
        self.present = [f"device-{number}" for number in range(DEVICES - 1)]
        self.confirmations = {}
        for _, device, one in others:
            for_it = {other: given[device] for other, given in shares.items() if other != device}
            one.masked(for_it, np.zeros(ELEMENTS, np.uint32))
            if device in self.present:
                self.confirmations[device] = one.confirmed(self.present)

    def other(self, number: int, **terms: Any) -> tuple[str, str, SecretSharer]:
        """Another device: its public key, its id, and its side of the attempt."""
        key, name, apart = DeviceKey.new(), f"device-{number}", terms.pop("apart", 0.07)
        about = (self.device["round"], self.device["bundle"], replace(self.terms, **terms), apart)
        return key.public, name, SecretSharer(name, key.signature, key.public, *about)

    def honest(self) -> Script:
        """What a coordinator asks that keeps all rules."""
        return [
            ["shares", self.listed(self.members)],
            ["masked", self.received, self.vector],
            ["confirmed", self.present],
            ["unmasking", self.present, self.confirmations],
        ]

    def listed(self, members: Sequence[SecureMember]) -> Any:
        return msgspec.to_builtins(list(members))

    def lies(self) -> dict[str, Script]:
        """What a coordinator asks that breaks a rule, by the rule."""
        shares, masked, confirmed, unmasking = self.honest()
        group, received = self.members, self.received
        name = group[1].device
        altered = received[name][:-8] + "AAAAAAA="
        stranger = [*self.present[:-1], "stranger"]
        invented = DeviceKey.new()

        def first(*members: SecureMember) -> Script:
            return [["shares", self.listed(members)]]

        def second(member: SecureMember) -> Script:
            return first(group[0], member, *group[2:])

        def told(**terms: Any) -> Script:
            public, device, one = self.other(1, **terms)
            return second(SecureMember(device=device, key=public, keys=one.keys))

        def with_key(mask_key: str) -> Script:
            own = self.device
            keys = group[1].keys
            about = (own["round"], own["bundle"], self.terms, own["apart"], mask_key)
            signature = invented.signature(keys_text(*about, keys.share_key))
            keys = replace(keys, mask_key=mask_key, signature=signature)
            return second(SecureMember(device=name, key=invented.public, keys=keys))

        mine = self.other(1)[2].keys
        return {
            "few devices": first(*group[:3]),
            "without this device": first(*group[1:]),
            "another key of this device": first(replace(group[0], key=invented.public), *group[1:]),
            "other keys of this device": first(replace(group[0], keys=mine), *group[1:]),
            "a device twice": first(*group, group[1]),
            "a key twice": first(*group[:4], replace(group[4], keys=group[3].keys)),
            "keys that nobody has signed": second(
                replace(group[1], keys=replace(mine, signature=group[1].keys.signature))
            ),
            "no key": second(replace(group[1], key="")),
            "a key of small order": with_key(text_of(bytes(32))),
            "a short key": with_key(text_of(b"short")),
            "a key that is not base64": with_key("%" * 43 + "="),
            "another most_change": told(most_change=1e6),
            "another most_samples": told(most_samples=10**6),
            "another fewest": told(fewest=3),
            "another share": told(apart=0.9),
            "shares twice": [shares, shares],
            "no group": [masked, confirmed, unmasking],
            "shares of a stranger": [shares, ["masked", {"stranger": altered}, self.vector]],
            "own shares": [shares, ["masked", {**received, "device-0": altered}, self.vector]],
            "altered shares": [shares, ["masked", {**received, name: altered}, self.vector]],
            "shares that are not base64": [
                shares, ["masked", {**received, name: "%"}, self.vector]
            ],
            "few shares": [shares, ["masked", {name: received[name]}, self.vector]],
            "the update twice": [shares, masked, masked],
            "a list before the update": [shares, confirmed],
            "another list": [shares, masked, confirmed, ["confirmed", [m.device for m in group]]],
            "a stranger in the sum": [shares, masked, ["confirmed", stranger]],
            "a device twice in the sum": [shares, masked, ["confirmed", self.present[:1] * 5]],
            "a sum without this device": [shares, masked, ["confirmed", self.present[1:]]],
            "a small sum": [shares, masked, ["confirmed", self.present[:3]]],
            "shares for no list": [shares, masked, unmasking],
            "shares for another list": [
                shares, masked, confirmed, ["unmasking", self.present[:-1], self.confirmations]
            ],
            "few confirmations": [
                shares, masked, confirmed,
                ["unmasking", self.present, dict(list(self.confirmations.items())[:2])],
            ],
            "confirmations that nobody has signed": [
                shares, masked, confirmed,
                ["unmasking", self.present, dict.fromkeys(self.present, "A" * 86 + "==")],
            ],
        }  # fmt: skip
