"""Folding the updates of one round into the global model, without those that cannot be used."""

from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import chain
from typing import Protocol

import numpy as np
from msgspec.structs import replace
from safetensors import SafetensorError

from device_agent.formats.tensor_files import tensors_in
from device_agent.formats.update import MOST_SAMPLES, UpdateRecord
from profiles.errors import EdgeTailorError, UpdateError
from profiles.json_decoding import MalformedError, decode_json
from toolkit.aggregation.update_bounds import (
    LIMIT,
    SUSPICIOUS,
    Excess,
    Scales,
    excesses,
    most_samples,
)
from toolkit.coordinator.rounds.upload_validation import is_finite
from toolkit.coordinator.storage.coordinator_store import Store
from toolkit.coordinator.storage.suspicions import Suspect

Update = tuple[UpdateRecord, dict[str, np.ndarray]]
Quality = tuple[float | None, float]
"""Accuracy (None for a regression) and loss on held-out samples."""
DAMAGED = "its tensors are missing or damaged in the coordinator's state folder"


class Model(Protocol):
    """The part of a global model that the rounds need; `Federation` is one."""

    def bundle(self, submodel: str, round_: int) -> dict[str, bytes]:
        """The files of the bundle for the current round `round_`: name to content."""

    def scales(self, update: Update) -> Scales:
        """How large the numbers of `update` are. Raises UpdateError if it does not fit."""

    def fold(self, updates: Iterable[Update]) -> None:
        """Fold updates into the global model."""

    def evaluate(self, x: np.ndarray, y: np.ndarray) -> Quality:
        """Accuracy (None for a regression) and loss of the global model on samples."""

    def check_training(self, x: np.ndarray, y: np.ndarray) -> None:
        """Raise UpdateError if a training step of the global model on samples is not finite."""

    def save(self) -> bytes:
        """The whole state."""

    def load(self, data: bytes) -> None:
        """Restore a state that `save` returned."""


class RoundAggregation:
    """Folds the updates of `round_` into `model`.

    An update that cannot be folded is left out: it is damaged, far beyond its bounds, or the model
    with it cannot predict or train. If none can be folded, the model stays as it was.

    Attributes:
        left_out: Why an update was left out, by device.
        excess: How far each update that fits the model is beyond its references, by device.
        quality: The quality of the new model on `held_out`.
    """

    def __init__(
        self, model: Model, store: Store, held_out: tuple[np.ndarray, np.ndarray], round_: int
    ) -> None:
        self.left_out: dict[str, str] = {}
        self.excess: dict[str, Excess] = {}
        self.quality: Quality = (None, 0.0)
        self._model, self._store, self._held_out = model, store, held_out
        self._round, self._must_train = round_, True
        self._most_samples = MOST_SAMPLES

    def run(self) -> int:
        """Fold the updates. Returns how many the new model has."""
        devices = [device for device, _, _ in self._store.updates(self._round)]
        self._bound(devices)
        try:
            self._fold(devices)
        except EdgeTailorError:
            self._fold_sound(devices)
        return len(devices) - len(self.left_out)

    @property
    def suspect(self) -> Suspect | None:
        """The update in the model that is furthest beyond its references, if one stands out."""
        inside = {d: one for d, one in self.excess.items() if d not in self.left_out}
        device = max(inside, key=lambda device: inside[device].times, default=None)
        if device is None or inside[device].times <= SUSPICIOUS:
            return None
        return Suspect(round=self._round, device=device, reason=str(inside[device]))

    def _bound(self, devices: Sequence[str]) -> None:
        """Leave out updates that do not fit the model or are far beyond their bounds."""
        found: dict[str, Scales] = {}
        samples = []
        for device, update in self._updates(set(devices)):
            try:
                found[device] = self._model.scales(update)
            except EdgeTailorError as error:
                self.left_out[device] = str(error)
                continue
            samples.append(update[0].samples)
            del update  # otherwise two updates are in memory while the next one is read
        self.excess = excesses(found)
        for device, excess in self.excess.items():
            if excess.times > LIMIT:
                self.left_out[device] = f"{excess}, and {LIMIT:g} times as much is the most."
        if samples:
            self._most_samples = most_samples(samples)

    def _fold_sound(self, devices: Sequence[str]) -> None:
        """Fold all updates but those with which the model cannot be used."""
        self._must_train = self._trained_before()
        self._find_unsound(devices)
        self._restore_model()
        try:
            self._fold(devices)
        except EdgeTailorError as error:  # each alone is fine, and together they are not
            self._fold_least(devices, str(error))

    def _fold_least(self, devices: Sequence[str], reason: str) -> None:
        """Leave out updates, the furthest beyond its references first, until the others are fine.

        Twice as many each time, so that few folds are made of many updates.
        """
        left = [device for device in devices if device not in self.left_out]
        left.sort(key=lambda device: self.excess[device].times, reverse=True)
        count = 1
        while True:
            self.left_out |= dict.fromkeys(left[:count], reason)
            self._restore_model()
            try:
                self._fold(devices)
                return
            except EdgeTailorError:
                if count >= len(left):
                    raise
            count *= 2

    def _trained_before(self) -> bool:
        """Whether the model before this round trains on the samples that judge the new one.

        If not, that says nothing about the updates.
        """
        self._restore_model()
        try:
            self._model.check_training(*self._held_out)
        except UpdateError:
            return False
        return True

    def _find_unsound(self, devices: Sequence[str]) -> None:
        """Leave out those of `devices`, which cannot be folded together, that cannot be alone.

        By halves: among n updates an unsound one is found in about 2 log2 n folds.
        """
        middle = max(len(devices) // 2, 1)
        for half in (devices[:middle], devices[middle:]):
            if not half:
                continue
            self._restore_model()
            try:
                self._fold(half)
            except EdgeTailorError as error:
                if len(half) == 1:
                    self.left_out.setdefault(half[0], str(error))
                else:
                    self._find_unsound(half)

    def _fold(self, devices: Iterable[str]) -> None:
        """Fold the updates of `devices` that are not left out. May raise any EdgeTailorError."""
        updates = self._weighable_updates(set(devices))
        first = next(updates, None)
        empty = first is None
        if first is not None:
            # An iterator lets go of it. As a list, or as a variable, it would stay in memory while
            # the others are read.
            together = chain(iter([first]), updates)
            del first
            self._model.fold(together)
        self.quality = self._model.evaluate(*self._held_out)
        loss = self.quality[1]
        if empty:
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

    def _weighable_updates(self, devices: Set[str]) -> Iterator[Update]:
        """The updates of `devices`, as they are weighed."""
        for _, update in self._updates(devices):
            yield self._weighable(update)
            del update

    def _weighable(self, update: Update) -> Update:
        """`update` with no more samples than one of this round may claim."""
        record, arrays = update
        if record.samples <= self._most_samples:
            return update
        return replace(record, samples=self._most_samples), arrays

    def _updates(self, devices: Set[str]) -> Iterator[tuple[str, Update]]:
        """The updates of `devices`, one in memory at a time; unreadable ones are left out."""
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
        data = self._store.model()
        assert data is not None
        self._model.load(data)
