"""The secure sums of a round: one for each submodel. It uses no HTTP, no storage and no clock.

Devices that have trained offer keys. When the round closes, the devices of one submodel form a
group, and each group goes through the steps of a SecretSum. Keys and sums do not survive a restart:
the round then opens again, and the devices offer new keys.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from device_agent.formats.protocol.secure_sums import (
    SecureMember,
    SecureStep,
    SecureTerms,
    Step,
)
from device_agent.privacy.secret_sum import SecretSum
from profiles.errors import UpdateError
from profiles.text_formatting import counted

SHORT_S = 30.0
"""The longest duration of a step, except the step in which devices send their updates."""
SMALL = "only {devices} trained {submodel}, and a secure sum needs {fewest}"


@dataclass
class RunningSum:
    """The sum of one group.

    Attributes:
        sum: The state of the sum.
        signature: The coordinator's signature of the group.
        ends_at: When the present step ends.
        failure: Why the sum has failed; None if it has not failed.
    """

    sum: SecretSum
    signature: str
    ends_at: float
    failure: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether the sum has failed, or all shares have come."""
        return self.failure is not None or self.sum.step == "over"


class RoundSums:
    """The secure sums of the open round, or of the round that has just closed.

    Attributes:
        running: The sums of the closed round, by submodel.
        too_small: Why a submodel has no sum, by submodel.
        has_begun: Whether the round has closed, so that no more keys are taken.
    """

    def __init__(self, terms: SecureTerms) -> None:
        self.terms = terms
        self._offers: dict[str, tuple[str, SecureMember]] = {}
        self.running: dict[str, RunningSum] = {}
        self.too_small: dict[str, str] = {}
        self.has_begun = False

    def offer(self, submodel: str, member: SecureMember) -> bool:
        """Note the keys of a device that has trained `submodel`; they replace its earlier keys.

        Returns False if the sums have begun.
        """
        if self.has_begun:
            return False
        self._offers[member.device] = submodel, member
        return True

    def begin(
        self,
        round_: int,
        devices: Collection[str],
        now: float,
        sign: Callable[[int, list[SecureMember]], str],
    ) -> None:
        """Form the groups of `devices` in the closed round.

        `sign` makes the coordinator's signature of a group.
        """
        self.has_begun = True
        self._offers = {d: offer for d, offer in self._offers.items() if d in devices}
        groups: dict[str, list[SecureMember]] = {}
        for submodel, member in self._offers.values():
            groups.setdefault(submodel, []).append(member)
        for submodel, members in sorted(groups.items()):
            if len(members) < self.terms.fewest:
                self.too_small[submodel] = SMALL.format(
                    devices=counted(len(members), "device"),
                    submodel=submodel,
                    fewest=self.terms.fewest,
                )
                continue
            own = SecretSum(round_, members, self.terms.fewest)
            signature = sign(round_, members)
            self.running[submodel] = RunningSum(own, signature, now + SHORT_S)

    def advance(self, now: float, input_s: float, absent: set[str]) -> bool:
        """End steps that all devices have answered, or whose time is over.

        Returns whether all sums are over.

        Args:
            now: The present time, in seconds.
            input_s: How long devices may take to send their updates, in seconds.
            absent: Devices that have left or stopped: nothing waits for them.
        """
        for running in self.running.values():
            while not running.is_over and (
                running.sum.waits_for <= absent or running.ends_at <= now
            ):
                try:
                    running.sum.advance()
                except UpdateError as error:
                    running.failure = str(error)
                running.ends_at = now + (input_s if running.sum.step == "input" else SHORT_S)
        return all(running.is_over for running in self.running.values())

    def step_of(self, device: str, round_: int) -> SecureStep | None:
        """The next step of `device`; None if it has offered no keys."""
        if device not in self._offers:
            return None
        running = self._running(device)
        if running is None:
            step: Step = "over" if self.has_begun else "wait"
            return SecureStep(step=step, round=round_)
        if running.failure is not None:
            return SecureStep(step="wait", round=round_)
        return replace(running.sum.step_of(device), signature=running.signature)

    def expecting(self, device: str, step: Step) -> SecretSum | None:
        """The sum whose step `step` the device may answer now, or None."""
        running = self._running(device)
        if running is None or running.failure is not None:
            return None
        return running.sum if running.sum.expects(device, step) else None

    def clear(self) -> None:
        """Forget the keys and sums, because a round opens."""
        self._offers, self.running, self.too_small, self.has_begun = {}, {}, {}, False

    def devices_of(self, submodel: str) -> list[str]:
        """The devices that have offered keys for `submodel`."""
        return sorted(device for device, (own, _) in self._offers.items() if own == submodel)

    def _running(self, device: str) -> RunningSum | None:
        submodel, _ = self._offers.get(device, ("", None))
        return self.running.get(submodel)
