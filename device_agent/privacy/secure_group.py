"""The devices of one attempt at a sum: which devices share masks, and how many shares are needed.

A device shares masks only with its neighbours, as in SecAgg+ (Bell et al., "Secure Single-Server
Aggregation with (Poly)Logarithmic Overhead", 2020). In a group of up to MOST_NEIGHBOURS + 1
devices, all devices are neighbours.
"""

import base64
import hashlib
from collections.abc import Collection, Sequence
from functools import cached_property

from device_agent.formats.protocol.secure_sums import (
    SecureMember,
    SecureTerms,
    group_text,
    keys_text,
)
from device_agent.formats.signed_work import is_signed
from device_agent.privacy.masks import is_usable
from device_agent.privacy.shamir import MOST_SHARES

MOST_NEIGHBOURS = 100
"""Even, because each device has as many neighbours before it on the ring as after it."""
assert MOST_NEIGHBOURS < MOST_SHARES


def threshold(holders: int) -> int:
    """How many of `holders` shares are needed to restore a secret: three fifths.

    The threshold must be more than half. Each device has two secrets, and an honest holder gives a
    share of only one of them. So if more than half of the shares are needed, a coordinator cannot
    collect both secrets by telling the holders different things (Bonawitz et al. 2017, section
    6.2). With three fifths, this is true until a fifth of the holders work for the coordinator. Up
    to two fifths of a group may be lost after the group's keys have arrived.

    Examples:
        >>> [threshold(holders) for holders in (3, 4, 5, 10, 30)]
        [2, 3, 3, 6, 18]
    """
    return max(holders // 2 + 1, -(-3 * holders // 5))


class SecureGroup:
    """The members of a group, who all see the same list.

    Attributes:
        members: The members by id.
        context: A digest of the list. All keys and signatures of the attempt depend on it, so two
            devices that were told different lists cannot decrypt each other's shares.
    """

    def __init__(self, round_: int, members: Sequence[SecureMember]) -> None:
        self.members = {member.device: member for member in members}
        self.context = hashlib.sha256(group_text(round_, list(members))).digest()

    @cached_property
    def _ring(self) -> list[str]:
        """The members in an order that follows from all keys, so no member can choose its place."""
        return sorted(
            self.members, key=lambda device: hashlib.sha256(self.context + device.encode()).digest()
        )

    @cached_property
    def _places(self) -> dict[str, int]:
        return {device: place for place, device in enumerate(self._ring)}

    def neighbours(self, device: str) -> list[str]:
        """The devices with which `device` shares masks, sorted."""
        size, place = len(self._ring), self._places[device]
        reach = min(MOST_NEIGHBOURS, size - 1)
        if reach == size - 1:
            return sorted(self.members.keys() - {device})
        half = range(1, reach // 2 + 1)
        places = [(place + step) % size for way in half for step in (way, -way)]
        return sorted(self._ring[near] for near in places)

    def holders(self, device: str) -> list[str]:
        """The devices that have a share of the secrets of `device`: itself and its neighbours.

        A holder's position in this list, counted from 1, is the point of its share.
        """
        return sorted([*self.neighbours(device), device])

    def needed(self, device: str) -> int:
        """How many shares are needed to restore a secret of `device`."""
        return threshold(len(self.holders(device)))

    @property
    def confirmations(self) -> int:
        """How many members must confirm the same list of devices before a member unmasks."""
        return threshold(len(self.members))

    def is_enough(self, left: Collection[str], among: Collection[str]) -> bool:
        """Whether the devices `left` have enough shares of all devices in `among`."""
        rest = set(left)
        return all(len(rest.intersection(self.holders(d))) >= self.needed(d) for d in among)


def has_own_keys(
    member: SecureMember, round_: int, bundle: str, terms: SecureTerms, apart: float
) -> bool:
    """Whether `member` offers usable keys, and has signed them for this sum.

    `apart` is the share of samples that devices use only to judge models.
    """
    keys = member.keys
    text = keys_text(round_, bundle, terms, apart, keys.mask_key, keys.share_key)
    if not is_signed(member.key, keys.signature, text):
        return False
    try:
        return all(is_usable(bytes_of(key)) for key in (keys.mask_key, keys.share_key))
    except ValueError:
        return False


def adds(device: str, neighbour: str) -> bool:
    """Whether `device` adds the mask that it shares with `neighbour`; otherwise it subtracts it."""
    return device < neighbour


def text_of(data: bytes) -> str:
    """`data` in base64."""
    return base64.b64encode(data).decode()


def bytes_of(text: str) -> bytes:
    """The bytes of base64. Raises ValueError for other text."""
    return base64.b64decode(text, validate=True)
