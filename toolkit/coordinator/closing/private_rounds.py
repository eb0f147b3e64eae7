"""Differential privacy for devices in `serve`: selects devices, and aggregates with noise."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from random import SystemRandom

import msgspec

from device_agent.formats.manifest import Struct, encode
from device_agent.formats.protocol.fleet import RoundResult, SpentPrivacy
from profiles.errors import EdgeTailorError
from toolkit.aggregation.privacy.budget import PrivacyPlan, RoundNoise
from toolkit.coordinator.closing.round_aggregation import RoundAggregation
from toolkit.coordinator.closing.round_models import Model, PrivateModel, Samples
from toolkit.coordinator.coordinator import Coordinator
from toolkit.coordinator.database.device_registry import Device
from toolkit.coordinator.rounds.upload_validation import Update, is_finite
from toolkit.coordinator.storage.coordinator_store import Store

logger = logging.getLogger(__name__)
OPENING = "private_opening"
"""The key in the store for the `Opening` of the open round."""
UNUSABLE = "the noised model is unusable, so the model stays as it was: {reason}"


class Opening(Struct, frozen=True, kw_only=True):
    """How `round` asked its devices.

    Attributes:
        round: The round.
        probability: The probability of asking a device, as used for epsilon.
        devices: The expected number of devices that it asked, by submodel.
    """

    round: int
    probability: float
    devices: dict[str, float]


class PrivateRounds:
    """The privacy of the rounds of `coordinator`.

    Each device is asked with the same probability, independently of other devices. The random
    numbers come from the operating system's cryptographic generator. The probability is
    `clients_per_round` divided by the number of members. If there are fewer members than expected,
    the expected number is the divisor.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        assert coordinator.privacy_plan is not None
        self._plan: PrivacyPlan = coordinator.privacy_plan

    def asked(self, round_: int, candidates: Sequence[Device]) -> list[str]:
        """Draw the devices that `round_` asks, and store the round's `Opening`."""
        coordinator, draw = self._coordinator, SystemRandom()
        with coordinator.lock:
            members = len(coordinator.rounds.present)
            probability = coordinator.config.asking_probability(members)
            counted = coordinator.config.counted_probability(members)
            devices: dict[str, float] = {}
            for device in candidates:
                submodel = coordinator.submodel(device)
                devices[submodel] = devices.get(submodel, 0.0) + probability
        opening = Opening(round=round_, probability=counted, devices=devices)
        coordinator.store.set_value(OPENING, encode(opening).decode())
        return [device.id for device in candidates if draw.random() < probability]

    def opening(self, round_: int) -> Opening:
        """How `round_`, which has opened, asked its devices."""
        opening = msgspec.json.decode(self._coordinator.store.value(OPENING) or "", type=Opening)
        assert opening.round == round_
        return opening

    def noise(self, round_: int) -> RoundNoise:
        """The clipping and the noise of `round_`, the open round."""
        return self._plan.noise(self._earlier(), sum(self.opening(round_).devices.values()))

    def spent(self, round_: int, within: float | None) -> SpentPrivacy:
        """The budget that is spent after `round_`, the open round; see `PrivacyPlan.after`."""
        return self._plan.after(self._earlier(), self.opening(round_).probability, within)

    def ends_with(self, result: RoundResult) -> bool:
        """Whether the budget allows no round after `result`, which is not stored yet. Logs this."""
        with self._coordinator.lock:
            members = len(self._coordinator.rounds.present)
            probability = self._coordinator.config.counted_probability(members)
        if self._plan.allows_another([*self._earlier(), result.privacy], probability):
            return False
        assert result.privacy is not None
        logger.info(
            "The rounds end after round %d, because another round would exceed the privacy budget: "
            "%s.",
            result.round,
            result.privacy.text(),
        )
        return True

    def _earlier(self) -> list[SpentPrivacy | None]:
        return [result.privacy for result in self._coordinator.store.history.results()]


class PrivateAggregation(RoundAggregation):
    """Aggregates the clipped changes of a round with noise.

    Single updates have no other effect: no update is judged, or left out because of its numbers.

    Attributes:
        within: The noised share of the changes within the clip, if the clip follows a quantile.
    """

    def __init__(
        self,
        model: Model,
        store: Store,
        held_out: Samples | None,
        opening: Opening,
        noise: RoundNoise | None = None,
    ) -> None:
        """Take the updates of a round. Without `noise`, they already contain noise."""
        super().__init__(model, store, held_out, opening.round)
        self._opening, self._noise = opening, noise
        self.within: float | None = None

    def run(self) -> int:
        """Aggregate the updates. Returns how many of them are in the sum."""
        devices = self._senders()
        assert isinstance(self._model, PrivateModel)  # the file refuses a site
        self._add_up(self._model, self._read_updates(devices))
        try:
            self._evaluate()
        except EdgeTailorError as error:
            for device in devices:
                self.left_out.setdefault(device, UNUSABLE.format(reason=error))
            self._restore_model()
            self._evaluate()
        return len(devices) - len(self.left_out)

    def _add_up(self, model: PrivateModel, updates: Iterable[Update]) -> None:
        assert self._noise is not None
        expected = self._opening.devices
        self.within = model.fold_noised(updates, expected, self._round, self._noise)

    def _read_updates(self, devices: Iterable[str]) -> Iterator[Update]:
        for _, update in self._updates(set(devices)):
            yield update
            del update  # otherwise two updates are in memory while the next one is read

    def _evaluate(self) -> None:
        self._fold(())
        if self.quality is not None and not is_finite(self.quality.loss):
            raise EdgeTailorError(
                "The loss of the noised model is {loss}. Lower `noise_multiplier` or `clip` in "
                "[privacy], or ask more devices.",
                code="privacy.diverged",
                loss=self.quality.loss,
            )
