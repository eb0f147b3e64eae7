"""Aggregates the updates of one round into the global model, without the unusable ones.

To fold an update means to aggregate it into the model.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from msgspec.structs import replace
from safetensors import SafetensorError

from device_agent.formats.protocol.fleet import Limited
from device_agent.formats.tensor_files import tensors_in
from device_agent.formats.update import MOST_SAMPLES, UpdateRecord
from profiles.errors import EdgeTailorError, UpdateError
from profiles.json_decoding import MalformedError, decode_json
from toolkit.aggregation.limits.reference import Figures, RoundLimits
from toolkit.aggregation.limits.update_bounds import (
    LIMIT,
    SUSPICIOUS,
    Excess,
    Scales,
    excesses,
    most_samples,
)
from toolkit.aggregation.model_judge import Bar, harmful, judged_text, search_order
from toolkit.aggregation.privacy.budget import RoundNoise
from toolkit.coordinator.database.suspicions import Suspect
from toolkit.coordinator.rounds.upload_validation import Update, is_finite
from toolkit.coordinator.storage.coordinator_store import Store

if TYPE_CHECKING:
    from toolkit.evaluation_sums import Evaluation

logger = logging.getLogger(__name__)

Samples = tuple[np.ndarray, np.ndarray]
"""Samples and labels."""
LOST_VERSION = "the model that it was trained from is not kept any more"
DAMAGED = "its tensors are missing or damaged in the coordinator's state folder"


class Model(Protocol):
    """The part of a global model that the rounds need. `Federation` implements it."""

    def bundle(self, submodel: str, round_: int) -> dict[str, bytes]:
        """The files of the bundle for the current round `round_`: contents by file name."""

    def check(self, update: Update, origin: str) -> None:
        """Raise UpdateError unless `update` fits the model; `origin` names it in the error.

        Any thread may call this method while the rounds use the model.
        """

    def scales(self, update: Update) -> Scales:
        """How large the numbers in each tensor of `update` are; `check` has accepted the update."""

    def figures(self, update: Update) -> Figures:
        """The figures of `update` before it is limited; `check` has accepted the update."""

    def fold_checked(self, updates: Iterable[Update], limits: RoundLimits | None = None) -> None:
        """Aggregate updates, which `check` has accepted, each within `limits`."""

    def evaluation(self, x: np.ndarray, y: np.ndarray) -> "Evaluation":
        """How good the global model is on samples."""

    def check_weights(self) -> None:
        """Raise UpdateError if a weight of the global model is not finite.

        Called instead of `evaluation` if the coordinator has no samples.
        """

    def check_training(self, x: np.ndarray, y: np.ndarray) -> None:
        """Raise UpdateError if a training step on samples gives a number that is not finite."""

    def save(self) -> bytes:
        """Return the whole state."""

    def load(self, data: bytes) -> None:
        """Restore a state that `save` returned."""


@runtime_checkable
class VersionedModel(Model, Protocol):
    """A global model for asynchronous rounds. `Federation` implements it."""

    def fold_versions(
        self,
        updates: Iterable[Update],
        stale: Iterable[tuple[int, bytes, Iterable[Update]]],
        limits: RoundLimits | None = None,
    ) -> None:
        """Aggregate checked updates of this model and of earlier versions into the global model.

        `stale` has for each version its staleness, the saved state, and the updates. Each update is
        limited by `limits`.
        """


@runtime_checkable
class PrivateModel(Model, Protocol):
    """A global model for rounds with differential privacy. `Federation` implements it."""

    def fold_noised(
        self,
        updates: Iterable[Update],
        devices: Mapping[str, float],
        round_: int,
        noise: RoundNoise,
    ) -> float | None:
        """Aggregate the clipped changes of the checked updates of `round_`, with noise.

        `devices` is how many devices of each submodel are expected in the sum. Returns the noised
        share of the changes within the clip, if `noise` is for that, too.
        """


@runtime_checkable
class CarryingModel(Model, Protocol):
    """A global model that can take over the weights of another. `Federation` implements it."""

    def carried(self, data: bytes) -> tuple[bytes, str]:
        """A state with the weights of the saved state `data` of another model, and what fits."""

    def keeps_personal(self, spec: str) -> bool:
        """Whether devices that train `spec` keep tensors of their own from round to round."""

    def loss_code(self) -> str | None:
        """What the user's own loss computes; None for other losses."""


def current_state(store: Store, model: Model) -> bytes:
    """The state that the next round starts from, as `model.load` takes it.

    After a change of `model`, the state of the earlier model is carried over.
    """
    data, round_ = store.model(), store.history.current_round()
    assert data is not None
    assert round_ is not None
    if store.settings.model_changed_after(round_):
        assert isinstance(model, CarryingModel)
        data, _ = model.carried(data)
    return data


class RoundAggregation:
    """Aggregates the updates of `round_` into `model`. Each update was checked when it arrived.

    An update is left out if it is damaged or far beyond its bounds. An update is also left out if
    the aggregated model cannot predict or train with this update. If every update is left out, the
    model stays as it was. If `bounded`, the other updates are limited; see
    `toolkit/aggregation/limits/update_limits.py`. If the new model misses `bar`, the updates that
    are the cause are left out; see `toolkit/aggregation/model_judge.py`.

    Attributes:
        left_out: Maps a device to the reason why its update was left out.
        limited: Maps a device to what the limits changed in its update.
        reference: The reference for the limits of the next round; None without limits.
        excess: Maps a device to how far its update exceeds the numbers that it is compared with.
        staleness: In asynchronous rounds, maps a device to the staleness of its update.
        quality: The quality of the new model on `held_out`; None without samples. Then a model is
            usable if its weights are finite.
    """

    def __init__(
        self,
        model: Model,
        store: Store,
        held_out: Samples | None,
        round_: int,
        asynchronous: bool = False,
        bounded: bool = False,
        bar: Bar | None = None,
    ) -> None:
        self.limited: dict[str, Limited] = {}
        self.reference = store.reference() if bounded else None
        self._limits: RoundLimits | None = None
        self._bar = bar
        self._kinds: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        self.excess: dict[str, Excess] = {}
        self.quality: Evaluation | None = None
        self._model, self._store, self._held_out = model, store, held_out
        self._round, self._must_train = round_, True
        self._most_samples = MOST_SAMPLES
        self.staleness: dict[str, int] = {}
        self._models: dict[int, str] = {}
        if asynchronous:
            self._find_versions()

    def run(self) -> int:
        """Aggregate the updates. Returns how many of them were not left out."""
        devices = self._senders()
        self._bound(devices)
        try:
            self._fold(devices)
        except EdgeTailorError:
            self._fold_sound([device for device in devices if device not in self.left_out])
        self._judge([device for device in devices if device not in self.left_out])
        if self._limits is not None:
            self.reference = self._limits.reference.after(self._limits.figures)
        return len(devices) - len(self.left_out)

    def _senders(self) -> list[str]:
        """The devices whose updates have come."""
        return [device for device, _, _ in self._store.updates(self._round)]

    @property
    def suspect(self) -> Suspect | None:
        """The aggregated update with the largest excess, if that is above SUSPICIOUS."""
        inside = {d: excess for d, excess in self.excess.items() if d not in self.left_out}
        device = max(inside, key=lambda device: inside[device].times, default=None)
        if device is None or inside[device].times <= SUSPICIOUS:
            return None
        return Suspect(round=self._round, device=device, reason=str(inside[device]))

    def _bound(self, devices: Sequence[str]) -> None:
        """Leave out updates that are far beyond their bounds."""
        scales: dict[str, Scales] = {}
        samples, unknown = [], {}
        for device, update in self._updates(set(devices)):
            self._kinds[device] = update[0].submodel
            scales[device] = self._model.scales(update)
            samples.append(update[0].samples)
            if self._is_unknown(device, update[0].submodel):
                unknown[device] = self._model.figures(update)
            del update  # otherwise two updates are in memory while the next one is read
        self.excess = excesses(scales)
        for device, excess in self.excess.items():
            if excess.times > LIMIT:
                limit = LIMIT * excess.room
                self.left_out[device] = f"{excess}. The limit is {limit:g} times that number."
        if samples:
            self._most_samples = most_samples(samples)
        if self.reference is not None:
            inside = [own for device, own in unknown.items() if device not in self.left_out]
            self.reference = self.reference.completed(inside)

    def _is_unknown(self, device: str, submodel: str) -> bool:
        """Whether the limits of an update need the figures of this round's updates."""
        if self.reference is None or self.staleness.get(device):
            return False
        return submodel not in self.reference.kinds

    def _judge(self, devices: Sequence[str]) -> None:
        """Leave out the updates of `devices` without which the model is better.

        All of them are in the model.
        """
        whole = self.quality
        aim = None if self._bar is None or whole is None else self._bar.aim(whole)
        if aim is None:
            return
        assert whole is not None
        what = "does not rise" if aim.stalled else "falls"
        text = "Round %d: the quality %s; updates are left out to find why."
        logger.info(text, self._round, what)

        def is_good(out: Collection[str]) -> bool:
            self._restore_model()
            try:
                self._fold([device for device in devices if device not in out])
            except EdgeTailorError:
                return False
            return self.quality is not None and aim.is_reached(self.quality)

        found = harmful(sorted(devices, key=self._most_limited_first), is_good, aim.stalled)
        self._restore_model()
        self._fold([device for device in devices if device not in found])
        assert self.quality is not None
        for device in found:
            self.left_out[device] = judged_text(self.quality, whole)

    def _most_limited_first(self, device: str) -> tuple[float, str, str]:
        """Sort the updates so that those that may be harmful together are neighbours."""
        return *search_order(self.limited.get(device), self._kinds.get(device, "")), device

    def _fold_sound(self, devices: Sequence[str]) -> None:
        """Fold those updates of `devices` that leave the model usable.

        The numbers of all these updates are within the bounds. Combined with other layers, the
        numbers may still be too large or lead to a division by almost zero. Only folding shows
        this. Updates with a larger excess are tried later.
        """
        self._must_train = self._trained_before()
        sound: list[str] = []
        self._add_sound(sorted(devices, key=lambda device: self.excess[device].times), sound)
        self._restore_model()
        self._fold(sound)

    def _add_sound(self, devices: Sequence[str], sound: list[str]) -> None:
        """Add to `sound` the devices whose updates can be folded together; leave the others out.

        The updates of all `devices` together cannot be folded, so each half is tried. Among n
        updates, this finds a single unusable one in about 2 log2 n folds.
        """
        middle = len(devices) // 2
        for half in filter(None, (devices[:middle], devices[middle:])):
            self._restore_model()
            try:
                self._fold([*sound, *half])
                sound += half
            except EdgeTailorError as error:
                if len(half) == 1:
                    self.left_out.setdefault(half[0], str(error))
                else:
                    self._add_sound(half, sound)

    def _trained_before(self) -> bool:
        """Whether the model before this round can train on the held-out samples.

        If it cannot, a failure of the new model says nothing about the updates.
        """
        if self._held_out is None:
            return False
        self._restore_model()
        try:
            self._model.check_training(*self._held_out)
        except UpdateError:
            return False
        return True

    def _fold(self, devices: Iterable[str]) -> None:
        """Fold the updates of `devices` that are not left out. May raise any EdgeTailorError."""
        usable = {device for device in devices if device not in self.left_out}
        if usable:
            self._fold_usable(usable)
        if self._held_out is None:
            self._model.check_weights()
            return
        self.quality = self._model.evaluation(*self._held_out)
        loss = self.quality.loss
        if not usable:
            return
        if not is_finite(loss):
            raise UpdateError(
                "The loss of the global model with this update is {loss}. If this happens to many "
                "devices, lower learning_rate in [training] and start again with another `state` "
                "folder.",
                code="update.diverging-model",
                loss=loss,
            )
        if self._must_train:
            self._model.check_training(*self._held_out)

    def _fold_usable(self, devices: Set[str]) -> None:
        """Fold the updates of `devices`, and note what was limited."""
        limits = None if self.reference is None else RoundLimits(self.reference)
        folded = self._fold_within(devices, limits)
        if limits is not None:
            self._limits, pairs = limits, zip(folded, limits.limited, strict=True)
            self.limited = {device: limited for device, limited in pairs if limited is not None}

    def _fold_within(self, devices: Set[str], limits: RoundLimits | None) -> list[str]:
        """Fold the updates of `devices`. Returns the devices in the order of their updates."""
        order: list[str] = []
        stale = sorted({tau for device in devices if (tau := self.staleness.get(device, 0))})
        if not stale:
            self._model.fold_checked(self._weighable_updates(devices, order), limits)
            return order

        def of(staleness: int) -> Iterator[Update]:
            same = {device for device in devices if self.staleness[device] == staleness}
            return self._weighable_updates(same, order)

        assert isinstance(self._model, VersionedModel)  # the file refuses a site
        # One model at a time is in memory.
        versions = ((tau, self._saved(tau), of(tau)) for tau in stale)
        self._model.fold_versions(of(0), versions, limits)
        return order

    def _saved(self, staleness: int) -> bytes:
        data = self._store.blobs.read(self._models[staleness])
        assert data is not None  # `_find_versions` has read it
        return bytes(data)

    def _find_versions(self) -> None:
        """Find the version that each update was trained from; leave out those of lost versions."""
        models, current = self._store.history.models(), self._store.history.current_round()
        assert current is not None
        ages = {model: self._round - 1 - version for version, model in sorted(models.items())}
        ages[models[current]] = 0
        for device, _, body in self._store.updates(self._round):
            base = decode_json(body, UpdateRecord).base
            if base not in ages or (ages[base] and not self._store.blobs.is_whole(base)):
                self.left_out[device] = LOST_VERSION
            else:
                self.staleness[device] = ages[base]
                self._models[ages[base]] = base

    def _weighable_updates(self, devices: Set[str], order: list[str]) -> Iterator[Update]:
        """Yield the updates of `devices`, and add their devices to `order`.

        Limits the number of samples that each counts.
        """
        for device, (record, arrays) in self._updates(devices):
            order.append(device)
            if self.reference is not None:  # these limits have a lower cap, and report it
                yield record, arrays
                continue
            yield replace(record, samples=min(record.samples, self._most_samples)), arrays
            del arrays  # otherwise two updates are in memory while the next one is read

    def _updates(self, devices: Set[str]) -> Iterator[tuple[str, Update]]:
        """Yield the updates of `devices`, one in memory at a time; leave unreadable ones out."""
        for device, sha256, body in self._store.updates(self._round):
            if device not in devices or device in self.left_out:
                continue
            update = self._read(sha256, body)
            if update is None:
                self.left_out[device] = DAMAGED
            else:
                yield device, update
                del update

    def _read(self, sha256: str, body: bytes) -> Update | None:
        """One update; None if its file cannot be read or has another content."""
        data = self._store.blobs.read(sha256)
        if data is None:
            return None
        try:
            return decode_json(body, UpdateRecord), tensors_in(data)
        except (SafetensorError, MalformedError):
            return None

    def _restore_model(self) -> None:
        """Restore the model as it was before this round."""
        self._model.load(current_state(self._store, self._model))
