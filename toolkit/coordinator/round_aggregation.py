"""Folding the updates of one round into the global model, without those that cannot be used."""

from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import chain
from typing import Protocol

import numpy as np
from safetensors import SafetensorError

from device_agent.formats.tensor_files import tensors_in
from device_agent.formats.update import UpdateRecord
from profiles.errors import EdgeTailorError, UpdateError
from profiles.json_decoding import MalformedError, decode_json
from toolkit.coordinator.rounds.upload_validation import is_finite
from toolkit.coordinator.storage.coordinator_store import Store

Update = tuple[UpdateRecord, dict[str, np.ndarray]]
Quality = tuple[float | None, float]
"""Accuracy (None for a regression) and loss on held-out samples."""
DAMAGED = "its tensors are missing or damaged in the coordinator's state folder"


class Model(Protocol):
    """The part of a global model that the rounds need; `Federation` is one."""

    def bundle(self, submodel: str, round_: int) -> dict[str, bytes]:
        """The files of the bundle for the current round `round_`: name to content."""

    def fold(self, updates: Iterable[Update]) -> None:
        """Fold updates into the global model."""

    def evaluate(self, x: np.ndarray, y: np.ndarray) -> Quality:
        """Accuracy (None for a regression) and loss of the global model on samples."""

    def save(self) -> bytes:
        """The whole state."""

    def load(self, data: bytes) -> None:
        """Restore a state that `save` returned."""


class RoundAggregation:
    """Folds the updates of `round_` into `model`.

    An update that cannot be folded is left out. If none can, the model stays as it was.

    Attributes:
        left_out: Why an update was left out, by device.
        quality: The quality of the new model on `held_out`.
    """

    def __init__(
        self, model: Model, store: Store, held_out: tuple[np.ndarray, np.ndarray], round_: int
    ) -> None:
        self.left_out: dict[str, str] = {}
        self.quality: Quality = (None, 0.0)
        self._model, self._store, self._held_out = model, store, held_out
        self._round = round_

    def run(self) -> int:
        """Fold the updates. Returns how many the new model has."""
        devices = [device for device, _, _ in self._store.updates(self._round)]
        try:
            self._fold(devices)
        except EdgeTailorError:
            self._fold_sound(devices)
        return len(devices) - len(self.left_out)

    def _fold_sound(self, devices: Sequence[str]) -> None:
        """Fold all updates but those that cannot be folded."""
        self._find_unsound(devices)
        self._restore_model()
        try:
            self._fold(devices)
        except EdgeTailorError as error:  # each alone is fine, and together they are not
            for device in devices:
                self.left_out.setdefault(device, str(error))
            self._restore_model()
            self._fold(devices)

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
        updates = self._updates(set(devices))
        first = next(updates, None)
        if first is not None:
            self._model.fold(chain([first], updates))
        self.quality = self._model.evaluate(*self._held_out)
        loss = self.quality[1]
        if first is not None and not is_finite(loss):
            raise UpdateError(
                f"The loss of the global model with this update is {loss}. If this happens to many "
                "devices, lower learning_rate in [training] and start again with another `state` "
                "folder.",
                code="update.diverging-model",
                loss=loss,
            )

    def _updates(self, devices: Set[str]) -> Iterator[Update]:
        """The updates of `devices`, one in memory at a time; unreadable ones are left out."""
        for device, sha256, body in self._store.updates(self._round):
            if device not in devices or device in self.left_out:
                continue
            update = self._read(sha256, body)
            if update is None:
                self.left_out[device] = DAMAGED
            else:
                yield update

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
