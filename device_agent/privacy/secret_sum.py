"""The coordinator's side of one attempt at a sum: it forwards messages and adds up vectors.

The coordinator learns only the sum of the updates that have arrived, not a single update. A failed
attempt reveals nothing. After a failure, the devices make a new attempt with new keys.
"""

import hmac
from collections.abc import Iterable, Sequence

import numpy as np

from device_agent.formats.protocol.secure_sums import (
    SecureMember,
    SecureStep,
    SecureUnmasking,
    Step,
    present_text,
)
from device_agent.formats.signed_work import is_signed
from device_agent.privacy.masks import add_mask, own_mask_key, pair_mask_key, public_key
from device_agent.privacy.secure_group import SecureGroup, adds, bytes_of
from device_agent.privacy.shamir import joined_secret
from profiles.errors import UpdateError

STEPS: Sequence[Step] = ("shares", "input", "confirm", "unmask", "over")


class SecretSum:
    """The sum of one group. Each step waits for the devices that answered the previous step.

    Args:
        round_: The round.
        members: At least three devices.
        fewest: The smallest number of devices whose updates are in the sum.

    Attributes:
        step: The present step.
        group: The group.
        waits_for: The devices whose answer to this step is missing.
        lost: The devices that have not answered a step, each with this step.
    """

    def __init__(self, round_: int, members: Sequence[SecureMember], fewest: int) -> None:
        self.group, self._round, self._fewest = SecureGroup(round_, members), round_, fewest
        self._members = sorted(members, key=lambda member: member.device)
        self.step: Step = STEPS[0]
        self._asked: set[str] = set(self.group.members)
        self._answered: set[str] = set()
        self.lost: dict[str, Step] = {}
        self._shares: dict[str, dict[str, str]] = {}
        self._sharing: set[str] = set()
        self.present: list[str] = []
        self._confirmations: dict[str, str] = {}
        self._unmaskings: dict[str, SecureUnmasking] = {}

    @property
    def waits_for(self) -> set[str]:
        """The devices whose answer to this step is missing."""
        return self._asked - self._answered

    def step_of(self, device: str) -> SecureStep:
        """The next step of `device`."""
        if device not in self._asked or self.step == "over":
            return SecureStep(step="over", round=self._round)
        if device in self._answered:
            return SecureStep(step="wait", round=self._round)
        if self.step == "shares":
            return SecureStep(step="shares", round=self._round, members=self._members)
        if self.step == "input":
            return SecureStep(step="input", round=self._round, shares=self._shares.get(device, {}))
        confirmations = self._confirmations if self.step == "unmask" else {}
        return SecureStep(
            step=self.step, round=self._round, present=self.present, confirmations=confirmations
        )

    def expects(self, device: str, step: Step) -> bool:
        """Whether `device` may answer `step` now. A device may repeat its answer."""
        return step == self.step and device in self._asked

    def take_shares(self, device: str, shares: dict[str, str]) -> bool:
        """Take the shares of `device` for its neighbours. Returns False if receivers are wrong."""
        if set(shares) != set(self.group.neighbours(device)):
            return False
        if device not in self._answered:
            self._answered.add(device)
            for receiver, content in shares.items():
                self._shares.setdefault(receiver, {})[device] = content
        return True

    def take_input(self, device: str) -> None:
        """Note that the masked update of `device` has arrived."""
        self._answered.add(device)

    def take_confirmation(self, device: str, signature: str) -> bool:
        """Take the signature of the list `present`. Returns False if the signature is wrong."""
        text = present_text(self.group.context, self.present)
        if not is_signed(self.group.members[device].key, signature, text):
            return False
        self._answered.add(device)
        self._confirmations[device] = signature
        return True

    def take_unmasking(self, device: str, unmasking: SecureUnmasking) -> None:
        """Take the shares of `device`."""
        self._answered.add(device)
        self._unmaskings.setdefault(device, unmasking)

    def advance(self) -> None:
        """End this step without the devices that have not answered.

        Raises UpdateError if too few devices are left. Then the attempt is over.
        """
        self.lost |= dict.fromkeys(sorted(self.waits_for), self.step)
        left, group = self._answered, self.group
        among = left if self.step == "shares" else self._sharing
        few = len(left) < self._fewest if self.step in ("shares", "input") else False
        few = few or not group.is_enough(left, among)
        if few or (self.step == "confirm" and len(left) < group.confirmations):
            raise _too_few(self.step, len(left), len(self._asked))
        if self.step == "shares":
            self._sharing = set(left)
            self._shares = {
                receiver: {sender: s for sender, s in shares.items() if sender in left}
                for receiver, shares in self._shares.items()
            }
        elif self.step == "input":
            self.present = sorted(left)
        self._asked, self._answered = set(left), set()
        self.step = STEPS[STEPS.index(self.step) + 1]

    def total(self, inputs: Iterable[np.ndarray]) -> np.ndarray:
        """The sum of the vectors, without masks.

        Args:
            inputs: The masked vectors of the devices in `present`, each (elements,) in uint32.

        Returns:
            The sum modulo 2^32, (elements,) in uint32.

        Raises:
            UpdateError: Shares of a device are wrong. Then the attempt is over.
        """
        vectors = iter(inputs)
        total = next(vectors).copy()
        for vector in vectors:
            total += vector
        context, here = self.group.context, set(self.present)
        for device in self.present:
            seed = self._secret(device, is_key=False)
            add_mask(total, own_mask_key(seed, context), subtract=True)
        for device in sorted(self._sharing - here):
            private = self._secret(device, is_key=True)
            keys = self.group.members[device].keys
            if not hmac.compare_digest(public_key(private), bytes_of(keys.mask_key)):
                raise _wrong_shares(device)
            for neighbour in here.intersection(self.group.neighbours(device)):
                theirs = bytes_of(self.group.members[neighbour].keys.mask_key)
                key = pair_mask_key(private, theirs, context)
                add_mask(total, key, subtract=adds(neighbour, device))
        return total

    def _secret(self, device: str, *, is_key: bool) -> bytes:
        points: dict[int, bytes] = {}
        for point, holder in enumerate(self.group.holders(device), 1):
            given = self._unmaskings.get(holder)
            share = (given.keys if is_key else given.seeds).get(device) if given else None
            if share is not None:
                points[point] = _share(share, device)
        needed = self.group.needed(device)
        if len(points) < needed:
            raise _wrong_shares(device)
        return joined_secret(dict(list(points.items())[:needed]))


def _share(text: str, device: str) -> bytes:
    try:
        share = bytes_of(text)
    except ValueError:
        share = b""
    if len(share) != 32:
        raise _wrong_shares(device)
    return share


def _too_few(step: Step, left: int, asked: int) -> UpdateError:
    return UpdateError(
        "Only {left} of {asked} devices have answered the step {step} of the secure sum, which is "
        "too few to remove the masks. Nothing was revealed: the devices repeat the sum with new "
        "keys.",
        code="update.too-few-in-sum",
        step=step,
        left=left,
        asked=asked,
    )


def _wrong_shares(device: str) -> UpdateError:
    return UpdateError(
        "The masks of {device} cannot be removed from the secure sum, because shares of its "
        "secrets are missing or wrong. The devices repeat the sum with new keys.",
        code="update.wrong-shares",
        device=device,
    )
