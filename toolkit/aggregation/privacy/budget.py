"""The cost of rounds in a privacy budget, by the accountant of Google's `dp-accounting`.

Each device takes part in a round with the probability q, independently of other devices. The
standard deviation of the noise is z times the largest norm of a change. This is the Gaussian
mechanism with Poisson sampling, composed over the rounds (Renyi differential privacy: Mironov,
Talwar and Zhang 2019). Two federations are neighbours if the changes of one device are zero in one
of them.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from device_agent.formats.protocol.fleet import SpentPrivacy
from profiles.errors import InputError

LEAST_NOISE, MOST_NOISE = 0.1, 1e4
"""The smallest and the largest noise multiplier that `noise_for` tries."""
TOLERANCE = 1.005
"""`noise_for` returns at most this many times the exact noise multiplier, and never less."""
COUNT_NOISE, LEAST_COUNT_NOISE = 20.0, 1.5
"""The noise in the sum of votes has the standard deviation devices / COUNT_NOISE, as in Andrew et
al., but at least LEAST_COUNT_NOISE noise multipliers. Then the noise in the sum of the changes
grows by at most 6.1%."""
CLIP_RATE = 0.2
"""How fast the clip follows its quantile, as in Andrew et al."""
LEAST_CLIP, MOST_CLIP = 1e-6, 1e6


class Sampled(NamedTuple):
    """The mechanism of one round: the probability of each device, and the noise multiplier."""

    probability: float
    noise_multiplier: float


@dataclass(frozen=True)
class PrivacyBudget:
    """The (epsilon, delta) that rounds may spend. Without `epsilon` there is no limit."""

    delta: float
    epsilon: float | None = None

    def spent(self, rounds: Iterable[Sampled]) -> float:
        """The epsilon of `rounds` together."""
        return _epsilon(tuple(sorted(Counter(rounds).items())), self.delta)


class RoundNoise(NamedTuple):
    """The clipping and the noise of one round.

    Attributes:
        clip: The largest L2 norm of a change.
        deviation: The standard deviation of the noise in the sum of the changes.
        devices: How many devices are expected in the round.
        count_deviation: The standard deviation of the noise in the sum of `vote`; None if it is not
            needed.
    """

    clip: float
    deviation: float
    devices: float
    count_deviation: float | None = None

    def vote(self, norm: float) -> float:
        """The vote of a device whose change has this norm: 1/2 or -1/2."""
        return 0.5 if norm <= self.clip else -0.5

    def share_within(self, votes: float, normal: float) -> float | None:
        """The noised share of devices whose change is within `clip`; None if it is not needed.

        `votes` is the sum of the votes, and `normal` is a standard normal number.
        """
        if self.count_deviation is None:
            return None
        share = 0.5 + (votes + self.count_deviation * normal) / self.devices
        return min(max(share, 0.0), 1.0)


@dataclass(frozen=True)
class PrivacyPlan:
    """How each round of a federation is kept private, and the budget of all rounds.

    With a `quantile`, `clip` is the clip of the first round. Later the clip follows the quantile of
    the norms (Andrew et al. 2021). After each round, the clip is multiplied by exp(-CLIP_RATE (b -
    quantile)). b is the noised share of the changes within the clip. The share b and the sum of the
    changes have separate noise. Together they cost as much as one sum with the noise multiplier z.
    """

    clip: float
    noise_multiplier: float
    budget: PrivacyBudget
    quantile: float | None = None

    def noise(self, earlier: Sequence[SpentPrivacy | None], devices: float) -> RoundNoise:
        """The noise of the next round, in which this number of `devices` is expected.

        `earlier` has the figures of the earlier rounds.
        """
        clip, z = self.next_clip(earlier), self.noise_multiplier
        devices = max(devices, 1.0)
        if self.quantile is None:
            return RoundNoise(clip, z * clip, devices)
        count = max(devices / COUNT_NOISE, LEAST_COUNT_NOISE * z)
        # 1 / z^2 = 1 / z_sum^2 + 1 / z_count^2 (theorem 1), where a vote has the size 1/2.
        own = z / math.sqrt(1 - (z / (2 * count)) ** 2)
        return RoundNoise(clip, own * clip, devices, count)

    def next_clip(self, earlier: Sequence[SpentPrivacy | None]) -> float:
        """The clip of the round after `earlier`."""
        last = next((spent for spent in reversed(earlier) if spent is not None), None)
        if self.quantile is None or last is None or last.within is None:
            return self.clip
        clip = last.clip * math.exp(-CLIP_RATE * (last.within - self.quantile))
        return min(max(clip, LEAST_CLIP), MOST_CLIP)

    def after(
        self,
        earlier: Sequence[SpentPrivacy | None],
        probability: float,
        within: float | None = None,
    ) -> SpentPrivacy:
        """The spent budget after one more round, which asks each device with this probability.

        `earlier` has the figures of the earlier rounds. If `clip` follows a quantile, `within` is
        the noised share of the round's changes within the clip.
        """
        own = Sampled(probability, self.noise_multiplier)
        before = [Sampled(e.probability, e.noise_multiplier) for e in earlier if e is not None]
        return SpentPrivacy(
            epsilon=self.budget.spent([*before, own]),
            delta=self.budget.delta,
            clip=self.next_clip(earlier),
            noise_multiplier=self.noise_multiplier,
            probability=probability,
            budget=self.budget.epsilon,
            within=within,
        )

    def allows_another(self, earlier: Sequence[SpentPrivacy | None], probability: float) -> bool:
        """Whether the budget is enough for one more round; see `after`."""
        limit = self.budget.epsilon
        return limit is None or self.after(earlier, probability).epsilon <= limit


@lru_cache(maxsize=16)
def noise_for(epsilon: float, delta: float, probability: float, rounds: int) -> float:
    """The smallest noise multiplier with which `rounds` rounds spend at most (epsilon, delta).

    Raises InputError if no noise multiplier up to MOST_NOISE is enough.

    Examples:
        >>> round(noise_for(epsilon=3.0, delta=1e-5, probability=1.0, rounds=50), 1)
        10.6
    """
    budget = PrivacyBudget(delta, epsilon)

    def enough(noise: float) -> bool:
        return budget.spent([Sampled(probability, noise)] * rounds) <= epsilon

    high = 1.0
    while high <= MOST_NOISE and not enough(high):
        high *= 2
    if high > MOST_NOISE:
        raise InputError(
            "No noise is enough for epsilon = {epsilon:g} and delta = {delta:g} in {rounds} "
            "rounds. Raise epsilon or delta in [privacy], or lower `rounds`.",
            code="privacy.impossible",
            epsilon=epsilon,
            delta=delta,
            rounds=rounds,
        )
    low = high / 2
    while low > LEAST_NOISE and enough(low):
        low, high = low / 2, low
    while high > TOLERANCE * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


@lru_cache(maxsize=1024)
def _epsilon(rounds: tuple[tuple[Sampled, int], ...], delta: float) -> float:
    accounting = _library()
    accountant = accounting.rdp.RdpAccountant(
        neighboring_relation=accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    )
    for (probability, noise), count in rounds:
        event = accounting.GaussianDpEvent(noise)
        if probability < 1:
            event = accounting.PoissonSampledDpEvent(probability, event)
        accountant.compose(event, count)
    return float(accountant.get_epsilon(delta))


def _library() -> Any:
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ModuleNotFoundError as error:
        raise InputError(
            "[privacy] with `delta` needs the package dp-accounting, which computes epsilon: "
            "{command}.",
            code="privacy.not-installed",
            command="pip install 'edgetailor[privacy]'",
        ) from error
    # dp-accounting warns of orders of Renyi's divergence that it leaves out; this only raises
    # epsilon.
    logging.getLogger("absl").setLevel(logging.ERROR)
    return dp_accounting
