"""The worker thread that turns the rounds: bundles, aggregation and evaluation."""

import json
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from device_agent.formats.atomic_files import shown, write_file
from device_agent.formats.manifest import MANIFEST, Dtype
from device_agent.formats.protocol import RoundResult
from device_agent.formats.tensor_files import read_tensors
from device_agent.formats.update import UpdateRecord
from device_agent.training.array_files import as_array, read_arrays
from device_agent.training.data_checks import check_arrays
from profiles.errors import EdgeTailorError
from profiles.text_formatting import counted
from toolkit.coordinator.coordinator import STARTED, Coordinator
from toolkit.coordinator.rounds.upload_validation import is_finite
from toolkit.coordinator.storage.device_registry import hashed

logger = logging.getLogger(__name__)

MODEL = "global.safetensors"
TICK_S = 0.5
"""How often a deadline is looked at, in seconds."""

Update = tuple[UpdateRecord, dict[str, np.ndarray]]


class Model(Protocol):
    """The global model, as far as rounds need it; `Federation` is one."""

    def bundle(self, submodel: str, round_: int) -> dict[str, bytes]:
        """The files of the bundle of round `round_`, which is the current one."""

    def fold(self, updates: Iterable[Update]) -> None:
        """Fold updates into the global model."""

    def evaluate(self, x: np.ndarray, y: np.ndarray) -> tuple[float | None, float]:
        """Accuracy and loss of the global model; a regression has no accuracy."""

    def save(self) -> bytes:
        """The whole state."""

    def load(self, data: bytes) -> None:
        """Take up a state that `save` gave."""


class RoundWorker:
    """Runs the heavy work of `coordinator` on one thread of its own, so that HTTP stays quick.

    A failure ends the thread, is kept as `failure`, and `on_failure` is called once.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        model: Model,
        held_out: tuple[np.ndarray, np.ndarray],
        on_failure: Callable[[], None],
    ) -> None:
        self.failure: Exception | None = None
        self._coordinator, self._model, self._held_out = coordinator, model, held_out
        self._on_failure = on_failure
        self._quality: tuple[float | None, float] = (None, 0.0)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="conductor", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after what it is doing now."""
        self._stopping.set()
        self._coordinator.changed.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._resume()
            while not self._stopping.is_set():
                self._turn()
                self._coordinator.changed.wait(TICK_S)
                self._coordinator.changed.clear()
        except Exception as error:  # kept, so that the server ends with it
            self.failure = error
            self._on_failure()

    def _turn(self) -> None:
        """Do whatever the rounds are ready for."""
        coordinator, rounds = self._coordinator, self._coordinator.rounds
        if rounds.phase in ("enrolling", "aggregating") and not self._prepared():
            self._prepare()
        with coordinator.lock:
            if rounds.phase == "aggregating" and rounds.devices and self._prepared():
                self._open()
            closing = rounds.due(coordinator.clock())
            if closing:
                coordinator.close()
        if closing:
            self._fold()
            self._tell_end()
            coordinator.changed.set()

    def _resume(self) -> None:
        data = self._coordinator.store.model()
        if data is not None:
            self._model.load(data)
            self._publish(data)
            rounds = self._coordinator.rounds
            if rounds.done < rounds.total:
                logger.info("Going on at round %d of %d.", rounds.done + 1, rounds.total)
            self._tell_end()
        else:
            self._check(0)
            self._keep(0, 0)

    def _prepared(self) -> bool:
        """Whether every bundle of the next round is there."""
        return self._coordinator.submodels() <= self._coordinator.bundles.keys()

    def _prepare(self) -> None:
        """Make the bundles of the next round."""
        coordinator = self._coordinator
        round_ = coordinator.rounds.done + 1
        made = {}
        for submodel in sorted(coordinator.submodels()):
            made[submodel] = self._model.bundle(submodel, round_)
            with coordinator.lock:
                coordinator.making.add(submodel)
        kept = coordinator.store.set_bundles(round_, made)
        with coordinator.lock:
            coordinator.bundles, coordinator.making = kept, set()

    def _open(self) -> None:
        """Open the next round, with the updates that it had before a restart."""
        coordinator, rounds = self._coordinator, self._coordinator.rounds
        store = coordinator.store
        offers = {
            device.id: coordinator.bundles[coordinator.submodel(device)][MANIFEST].sha256
            for device in store.registry.members()
        }
        rounds.open(offers, coordinator.clock())
        store.settle(STARTED, "yes")
        for device in store.drop_damaged(rounds.round):
            logger.warning("The update of %s is damaged on disk: it is asked for again.", device)
        for device, _, record in store.updates(rounds.round):
            if device in offers:
                rounds.take(device, rounds.round, offers[device], hashed(record.decode()))

    def _fold(self) -> None:
        coordinator = self._coordinator
        round_ = coordinator.rounds.round
        devices = [device for device, _, _ in coordinator.store.updates(round_)]
        try:
            self._take_in(round_, devices)
        except EdgeTailorError:
            devices = self._without_the_unsound(round_, devices)
        self._keep(round_, len(devices))
        with coordinator.lock:
            coordinator.rounds.folded()
            coordinator.bundles = {}

    def _take_in(self, round_: int, devices: Collection[str]) -> None:
        """Fold the updates of `devices`. Raises EdgeTailorError where the model diverges so."""
        self._model.fold(self._updates(round_, devices))
        self._check(round_)

    def _without_the_unsound(self, round_: int, devices: Sequence[str]) -> list[str]:
        """Fold those updates only by each of which alone the model does not diverge; whose.

        Raises EdgeTailorError where those are none, or all.
        """
        sound = [device for device in devices if self._is_sound(round_, device)]
        self._take_back()
        if not sound or len(sound) == len(devices):
            self._take_in(round_, devices)  # raises again
        self._take_in(round_, sound)
        others = ", ".join(device for device in devices if device not in sound)
        logger.warning(
            "Round %d: left out %s, by whose update the global model diverges.", round_, others
        )
        return sound

    def _is_sound(self, round_: int, device: str) -> bool:
        self._take_back()
        try:
            self._take_in(round_, [device])
        except EdgeTailorError:
            return False
        return True

    def _take_back(self) -> None:
        """Let the model be what it was before this round."""
        data = self._coordinator.store.model()
        assert data is not None
        self._model.load(data)

    def _tell_end(self) -> None:
        rounds = self._coordinator.rounds
        if rounds.done >= rounds.total:
            model = shown(self._coordinator.config.state / MODEL)
            logger.info("All rounds are done; global model: %s. Stop with Ctrl-C.", model)

    def _updates(self, round_: int, devices: Collection[str]) -> Iterator[Update]:
        """The updates of `devices` in a round, one in memory at a time."""
        store = self._coordinator.store
        for device, sha256, body in store.updates(round_):
            if device in devices:
                record = msgspec.json.decode(body, type=UpdateRecord)
                yield record, read_tensors(store.blobs.path(sha256))

    def _check(self, round_: int) -> None:
        """Find out how good the global model is. Raises EdgeTailorError where it has diverged."""
        self._quality = self._model.evaluate(*self._held_out)
        loss = self._quality[1]
        if not is_finite(loss):
            raise EdgeTailorError(
                f"The global model diverged: its loss after round {round_} is {loss}. Lower "
                "learning_rate in [training] and start again with another `state` folder."
            )

    def _keep(self, round_: int, updates: int) -> None:
        """Keep the global model as it is after `round_`."""
        data = self._model.save()
        accuracy, loss = self._quality
        result = RoundResult(round=round_, accuracy=accuracy, loss=loss, updates=updates)
        self._coordinator.store.add_result(result, data)
        self._publish(data)
        total = self._coordinator.rounds.total
        source = counted(updates, "update")
        logger.info("Round %d of %d: %s, from %s", round_, total, result.quality(), source)

    def _publish(self, model: bytes) -> None:
        """Write global.safetensors and history.json for people and other programs."""
        state = self._coordinator.config.state
        write_file(state / MODEL, model)
        results = [asdict(result) for result in self._coordinator.store.history()]
        document = {"version": 1, "history": results}
        write_file(state / "history.json", json.dumps(document, indent=1).encode() + b"\n")


def read_held_out(
    path: Path, shape: tuple[int, ...], labels: Dtype = "int64"
) -> tuple[np.ndarray, np.ndarray]:
    """Held-out samples of `shape` and their labels of the type `labels`.

    Raises DataError for another kind of file.
    """
    x, y = (np.array(as_array(found)) for found in read_arrays(path))
    dtype: Dtype = "int64" if x.dtype == np.int64 else "float32"
    check_arrays(x, y, shape, None, f"`held_out` {path}", dtype, labels=labels)
    return x, y
