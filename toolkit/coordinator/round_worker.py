"""The worker thread of the rounds: it makes bundles, aggregates and evaluates."""

import errno
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from msgspec import UnsetType

from device_agent.data.array_files import as_array, read_arrays
from device_agent.data.data_checks import check_arrays
from device_agent.data.data_source import needs_preparation
from device_agent.data.preparation import prepare
from device_agent.formats.atomic_files import shown
from device_agent.formats.label_rule import LabelRule
from device_agent.formats.manifest import MANIFEST, Dtype
from device_agent.formats.preprocessing import Preprocessing
from device_agent.formats.protocol import FederatedEvaluation, Preparation, RoundResult
from device_agent.formats.update import UpdateRecord
from profiles.errors import EdgeTailorError, StorageError
from profiles.json_decoding import decode_json
from profiles.text_formatting import counted
from toolkit.coordinator.coordinator import STARTED, Coordinator
from toolkit.coordinator.round_aggregation import Model, Quality, RoundAggregation, Samples
from toolkit.coordinator.rounds.device_evaluation import DeviceCounts, federated_evaluation
from toolkit.coordinator.rounds.falling_quality import falling
from toolkit.coordinator.rounds.upload_validation import is_finite
from toolkit.coordinator.storage.device_registry import hashed, label
from toolkit.coordinator.storage.published_files import publish
from toolkit.coordinator.storage.recoverable import MODEL
from toolkit.coordinator.untrainable_model import go_back, is_spoilt

logger = logging.getLogger(__name__)

TICK_S = 0.5
"""How often deadlines are checked, in seconds."""
LATE = "{more} updates came too late for their round; `status` names the devices."
LEFT_OUT = "{more} updates were left out; `history.json` names the devices."
ROOM_S = 5.0
"""How often a write to a full disk is tried again, in seconds."""
OFTEN = [10**power for power in range(7)]
"""A round that opens again is logged only after these numbers of deadlines without enough updates.
"""
CLASSES = LabelRule(None, None)
"""The rule of class labels while the model's number of classes is not known."""


class RoundWorker:
    """Does the heavy work of `coordinator` on its own thread, so that HTTP stays quick.

    The bundles of a round are made as soon as `ready` returns true. If the disk is full, the worker
    waits. Any other error ends the thread: the error is kept as `failure`, and `on_failure` is
    called. Without `held_out` the devices judge the models.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        model: Model,
        held_out: Samples | None,
        on_failure: Callable[[], None],
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        self.failure: Exception | None = None
        self._coordinator, self._model, self._held_out = coordinator, model, held_out
        self._on_failure, self._ready = on_failure, ready
        coordinator.check_update = model.check
        self._quality: Quality | None = None
        self._unmade: dict[str, str] = {}
        self._exported: set[str] = set()
        self._reopened: Counter[int] = Counter()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rounds", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current step."""
        self._stopping.set()
        self._coordinator.changed.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self.resume()
            while not self._stopping.is_set():
                self.turn()
                self._coordinator.changed.wait(TICK_S)
                self._coordinator.changed.clear()
        except Exception as error:  # the server raises it when it ends
            self.failure = _plain(error, self._coordinator.store.folder)
            self._on_failure()

    def turn(self) -> None:
        """Do the work that the rounds are ready for, if any."""
        coordinator, rounds = self._coordinator, self._coordinator.rounds
        coordinator.forget_absent()
        coordinator.released.refresh(coordinator.key)
        coordinator.release_to_all_if_taken()
        coordinator.minute_log.flush()
        with coordinator.lock:
            spoilt = is_spoilt(coordinator)
        if spoilt and go_back(coordinator):
            self._load_current()
        self._repeat_if_failed()
        waiting = rounds.phase in ("enrolling", "aggregating") and not self._prepared()
        if waiting and self._ready():
            self._when_room(self._prepare)
        if rounds.phase == "aggregating" and rounds.present and self._prepared():
            self._when_room(self._open)
            coordinator.store.remove_unnamed()  # last, so that no device waits for it
        if rounds.phase == "judging":
            self._judge_last()
        with coordinator.lock:
            closing = rounds.due(coordinator.clock())
            late = coordinator.close_round() if closing else []
        if closing:
            for device in late:
                if coordinator.minute_log.begins(f"{device.id} {rounds.round}", LATE):
                    text = "Round %d closed before the update of %s came."
                    logger.warning(text, rounds.round, label(device))
            self._fold()
            self._log_end()
            if rounds.phase == "finished":
                coordinator.store.remove_unnamed()
            coordinator.changed.set()

    def _judge_last(self) -> None:
        """Let devices judge the model of the last round, for which no round follows."""
        coordinator, rounds = self._coordinator, self._coordinator.rounds
        store = coordinator.store
        if rounds.judges and not self._prepared():
            try:
                self._when_room(self._prepare)
            except EdgeTailorError as error:  # the model cannot be used
                logger.warning("Devices cannot judge the model of the last round: %s", error)
                rounds.judges.clear()
        with coordinator.lock:
            if rounds.judges and not rounds.is_judging:
                for name in sorted(rounds.judges):
                    if not coordinator.bundles[coordinator.submodel(store.registry.device(name))]:
                        rounds.judges.discard(name)
                rounds.open_judging(coordinator.clock())
            over = rounds.judging_is_over(coordinator.clock())
            if over:
                # Later answers are refused.
                rounds.end_judging()
        if not over:
            return
        answers = store.final_evaluation.answers()
        figure = federated_evaluation(
            rounds.done,
            [
                DeviceCounts(store.registry.device(name).kind, counts)
                for name, counts in answers.items()
                if counts is not None
            ],
        )
        self._when_room(partial(store.judge_last, figure))
        data = store.model()
        assert data is not None
        self._when_room(partial(self._publish, data))
        if figure is not None:
            logger.info("The last model: %s.", figure.text())
        self._log_end()
        store.remove_unnamed()

    def _repeat_if_failed(self) -> None:
        """Open the round again if too few updates came before its deadline."""
        coordinator, rounds = self._coordinator, self._coordinator.rounds
        with coordinator.lock:
            if not rounds.failed(coordinator.clock()):
                return
            round_, received, needed = rounds.round, len(rounds.updates), rounds.needed
            rounds.reopen()
            coordinator.store.open_round.end()
        self._reopened[round_] += 1
        times = self._reopened[round_]
        if times in OFTEN:
            logger.warning(
                "Round %d: %s came before its deadline, and a round needs at least %d. It is open "
                "for %g s more. Updates that have come count.%s",
                round_,
                counted(received, "update"),
                needed,
                rounds.deadline_s,
                f" It has opened again {times} times." if times > 1 else "",
            )

    def _load_current(self) -> None:
        """Load and publish the model that the next round starts from."""
        data = self._coordinator.store.model()
        assert data is not None
        self._model.load(data)
        self._when_room(partial(self._publish, data))

    def resume(self) -> None:
        """Load and publish the latest model. In a new federation, save and publish the first."""
        if self._coordinator.store.current_round() is not None:
            self._load_current()
            rounds = self._coordinator.rounds
            if rounds.done < rounds.total:
                current = self._coordinator.store.current_round()
                origin = f" from the model of round {current}" if current != rounds.done else ""
                logger.info(
                    "Continuing with round %d of %d%s.", rounds.done + 1, rounds.total, origin
                )
            self._log_end()
        else:
            self._check_initial()
            self._keep(0, 0, {})

    def _prepared(self) -> bool:
        """Whether every bundle of the next round is made."""
        return self._coordinator.submodels() <= self._coordinator.bundles.keys()

    def _prepare(self) -> None:
        """Make the bundles of the next round."""
        coordinator = self._coordinator
        round_ = coordinator.rounds.done + 1
        kept = coordinator.store.set_bundles(round_, self._bundles(round_))
        with coordinator.lock:
            coordinator.bundles, coordinator.bundles_made = kept, set()
            coordinator.note_preparation("bundles", None)

    def _bundles(self, round_: int) -> Iterator[tuple[str, dict[str, bytes]]]:
        """Yield each submodel of `round_` with the files of its bundle.

        A submodel that the model does not allow has no files. Raises EdgeTailorError if that holds
        for every submodel.
        """
        coordinator = self._coordinator
        needed = sorted(coordinator.submodels())
        self._unmade = {}
        for number, submodel in enumerate(needed, 1):
            if submodel not in self._exported:  # later rounds only cut new weights
                logger.info(
                    "Round %d: preparing %s (%d of %d).", round_, submodel, number, len(needed)
                )
            self._exported.add(submodel)
            coordinator.note_preparation(
                "bundles",
                Preparation(task="bundles", submodel=submodel, number=number, total=len(needed)),
            )
            try:
                files = self._model.bundle(submodel, round_)
            except EdgeTailorError as error:
                self._unmade[submodel] = str(error)
                if len(self._unmade) == len(needed):
                    raise
                files = {}
            yield submodel, files
            with coordinator.lock:
                coordinator.bundles_made.add(submodel)

    def _open(self) -> None:
        """Open the next round, or continue it with the updates that came before a restart."""
        coordinator, rounds = self._coordinator, self._coordinator.rounds
        store = coordinator.store
        round_ = rounds.done + 1
        for damaged in store.drop_damaged(round_):
            logger.warning("The update of %s is damaged: the device sends it again.", damaged)
        earlier = [(name, hashed(body.decode())) for name, _, body in store.updates(round_)]
        store.set_once(STARTED, "yes")
        wall, limit = coordinator.wall_clock(), rounds.deadline_s
        remaining = store.open_round.begin(round_, wall + limit) - wall
        failures = store.open_round.failures(round_)
        with coordinator.lock:
            # Devices may have joined, left or reported that they diverge meanwhile.
            if rounds.present and self._prepared() and not is_spoilt(coordinator):
                counted_on = rounds.present | {name for name, _ in earlier}
                members = [d for d in store.registry.members() if d.id in counted_on]
                bundles = {d.id: coordinator.bundles[coordinator.submodel(d)] for d in members}
                offers = {name: files[MANIFEST].sha256 for name, files in bundles.items() if files}
                # A wall clock that was set while no coordinator ran must not keep the round open.
                left = min(max(remaining, 0.0), limit)
                rounds.open(dict.fromkeys(bundles, "") | offers, coordinator.clock(), left)
                for name, update in earlier:
                    if name in offers:
                        rounds.take(name, round_, offers[name], update)
                for name in failures:
                    rounds.excuse(name)
                for device in members:
                    if device.id not in offers:
                        reason = self._unmade.get(coordinator.submodel(device), "")
                        coordinator.excuse(device, f"it has no bundle in round {round_}: {reason}")
        if rounds.phase == "aggregating":  # nobody is left in it
            store.open_round.end()

    def _fold(self) -> None:
        coordinator = self._coordinator
        round_ = coordinator.rounds.round
        received = self._counts(round_)
        folding = RoundAggregation(self._model, coordinator.store, self._held_out, round_)
        updates = folding.run()
        self._quality = folding.quality
        for device, reason in folding.left_out.items():
            if coordinator.minute_log.begins(f"{device} {round_}", LEFT_OUT):
                logger.warning("Round %d: left out the update of %s: %s", round_, device, reason)
        if folding.suspect is not None:
            coordinator.store.suspicions.note_suspect(folding.suspect)
        # The counts of a device whose update is unusable are not trusted either.
        trusted = {d: counts for d, counts in received.items() if d not in folding.left_out}
        # After the last round the same devices are asked once more. If the process is killed before
        # the result is kept, the round is aggregated again and this is repeated.
        if round_ >= coordinator.rounds.total:
            coordinator.store.final_evaluation.begin(sorted(trusted))
        figure = federated_evaluation(round_, list(trusted.values()))
        self._keep(round_, updates, folding.left_out, figure)
        with coordinator.lock:
            coordinator.rounds.folded(trusted)
            coordinator.bundles = {}

    def _counts(self, round_: int) -> dict[str, DeviceCounts]:
        """The counts that came with the updates of `round_`, by device."""
        store = self._coordinator.store
        received: dict[str, DeviceCounts] = {}
        if self._coordinator.config.evaluation.request is None:
            return received
        for device, _, body in store.updates(round_):
            evaluation = decode_json(body, UpdateRecord).evaluation
            if not isinstance(evaluation, UnsetType):
                kind = store.registry.device(device).kind
                received[device] = DeviceCounts(kind, evaluation.before, evaluation.after)
        return received

    def _log_end(self) -> None:
        rounds = self._coordinator.rounds
        if rounds.done >= rounds.total and rounds.phase != "judging":
            model = shown(self._coordinator.config.state / MODEL)
            stays = self._coordinator.config.release.after_rounds is not None
            then = "Devices stay for releases: let this run." if stays else "Stop with Ctrl-C."
            logger.info("All rounds are done; global model: %s. %s", model, then)

    def _check_initial(self) -> None:
        """Evaluate the initial model. Raises EdgeTailorError if its loss is not finite.

        Without held-out samples, its weights must be finite.
        """
        if self._held_out is None:
            self._model.check_weights()
            return
        logger.info("Round 0: evaluating the initial model.")
        self._quality = self._model.evaluate(*self._held_out)
        loss = self._quality[1]
        if not is_finite(loss):
            raise EdgeTailorError(
                "The loss of the initial model is {loss}: give other `weights`, or check the "
                "`held_out` samples.",
                code="federation.diverged",
                loss=loss,
            )

    def _keep(
        self,
        round_: int,
        updates: int,
        left_out: Mapping[str, str],
        received: FederatedEvaluation | None = None,
    ) -> None:
        """Save and publish the global model after `round_`, with its quality.

        `received` is how the devices judge the model that they received in this round.
        """
        data = self._model.save()
        accuracy, loss = self._quality or (None, None)
        result = RoundResult(
            round=round_, accuracy=accuracy, loss=loss, updates=updates, left_out=dict(left_out)
        )
        store = self._coordinator.store
        self._when_room(partial(store.add_result, result, data, received))
        self._when_room(partial(self._publish, data))
        total = self._coordinator.rounds.total
        source = counted(updates, "update")
        logger.info("Round %d of %d: %s, from %s", round_, total, result.quality(), source)
        if received is not None:
            logger.info("Round %d of %d: received model: %s", round_, total, received.text())
        if (warning := falling(store.history())) is not None:
            logger.warning(warning)

    def _when_room(self, write: Callable[[], None]) -> None:
        """Run `write`. If the disk is full, say so once and run it again until there is room.

        Files that the database no longer names are removed first.
        """
        told = False
        while True:
            try:
                write()
                return
            except OSError as error:
                if not _is_full(error) or self._stopping.is_set():
                    raise
                if not told:
                    logger.warning(
                        "The disk with %s is full: the rounds wait until there is room. No update "
                        "is lost.",
                        self._coordinator.store.folder,
                    )
                told = True
            self._coordinator.store.remove_unnamed()
            self._stopping.wait(ROOM_S)

    def _publish(self, model: bytes) -> None:
        """Write global.safetensors and history.json, for people and other programs."""
        store = self._coordinator.store
        publish(store.folder, model, store.history(), store.models())


def _is_full(error: Exception) -> bool:
    """Whether `error` says that a disk is full."""
    return isinstance(error, OSError) and error.errno == errno.ENOSPC


def _plain(error: Exception, folder: Path) -> Exception:
    """Return `error` as the operator reads it: for a full disk, with the remedy."""
    if not _is_full(error):
        return error
    return StorageError(
        "The disk with {path} is full, so the rounds cannot go on. Make room on it, and start "
        "`edgetailor serve` again. No update is lost.",
        code="storage.disk-full",
        path=str(folder),
    )


def read_samples(
    path: Path,
    shape: tuple[int, ...],
    labels: LabelRule = CLASSES,
    key: str = "held_out",
    preprocessing: Preprocessing | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Read the coordinator's samples of `shape` and their labels, which must fit `labels`.

    With `preprocessing` they may be pictures or CSV files, like those of devices. `key` is their
    key in the federation's file, for messages.

    Raises:
        DataError: The file has no such samples.
        InputError: Pictures need a package that is not installed.
    """
    if preprocessing is not None and needs_preparation(path):
        # The label of a regression is one number here, because the model is not loaded yet.
        sample_labels = replace(labels, shape=(1,) if labels.dtype == "float32" else ())
        arrays = prepare(path, preprocessing, shape, sample_labels, None)
    else:
        arrays = read_arrays(path)
    x, y = (np.array(as_array(array)) for array in arrays)
    dtype: Dtype = "int64" if x.dtype == np.int64 else "float32"
    check_arrays(x, y, shape, labels, f"`{key}` {path}", dtype)
    return x, y
