"""The worker thread of the rounds: it makes bundles, aggregates and evaluates."""

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from device_agent.formats.atomic_files import shown
from device_agent.formats.protocol.fleet import (
    FederatedEvaluation,
    Limited,
    RoundResult,
)
from profiles.errors import EdgeTailorError
from profiles.text_formatting import counted, round_of
from toolkit.aggregation.limits.reference import Reference
from toolkit.coordinator.closing.central_judge import judges, pause_judged
from toolkit.coordinator.closing.committee_judging import decided_by_committee
from toolkit.coordinator.closing.device_selection import DeviceSelection
from toolkit.coordinator.closing.full_disk import plain, when_room
from toolkit.coordinator.closing.judging import counts_of_updates, judging_is_over, last_figure
from toolkit.coordinator.closing.new_settings import model_for_new_settings
from toolkit.coordinator.closing.private_rounds import PrivateAggregation, PrivateRounds
from toolkit.coordinator.closing.round_aggregation import RoundAggregation, current_state
from toolkit.coordinator.closing.round_models import Model, Samples
from toolkit.coordinator.closing.round_opening import RoundOpening
from toolkit.coordinator.closing.round_report import staleness_text, tell_round
from toolkit.coordinator.closing.secure_closing import (
    ClosedSums,
    NoisedSumAggregation,
    SumAggregation,
    close_sums,
    summed_evaluation,
)
from toolkit.coordinator.closing.untrainable_model import go_back, go_back_as_wanted, is_spoilt
from toolkit.coordinator.coordinator import Coordinator
from toolkit.coordinator.database.device_registry import label
from toolkit.coordinator.releases.release_schedule import (
    MakeRelease,
    release_if_due,
    release_to_all_if_taken,
)
from toolkit.coordinator.rounds.device_evaluation import federated_evaluation
from toolkit.coordinator.rounds.early_stopping import ends_early, note_early_end
from toolkit.coordinator.rounds.upload_validation import is_finite
from toolkit.coordinator.storage.published_files import publish
from toolkit.coordinator.storage.recoverable import MODEL

if TYPE_CHECKING:
    from toolkit.evaluation_sums import Evaluation

logger = logging.getLogger(__name__)

TICK_S = 0.5
"""How often deadlines are checked, in seconds."""
LATE = "{more} updates came too late for their round; `status` names the devices."
LEFT_OUT = "{more} updates were left out; `history.json` names the devices."
OFTEN = [10**power for power in range(7)]
"""A reopened round is logged only after these numbers of deadlines without enough updates.
"""


class RoundWorker:
    """Does the heavy work of `coordinator` on its own thread, so that HTTP stays quick.

    The bundles of a round are made as soon as `ready` returns true. If the disk is full, the worker
    waits. Any other error ends the thread: the error is kept as `failure`, and `on_failure` is
    called. Without `held_out` the devices judge the models.

    Attributes:
        failure: The error that ended the thread.
        make_release: Makes a release of the model of a round; None to make none.
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
        self._private = PrivateRounds(coordinator) if coordinator.config.device_privacy else None
        selection = DeviceSelection(coordinator, self._private)
        self._opening = RoundOpening(coordinator, model, selection, self._when_room)
        self._on_failure, self._ready = on_failure, ready
        coordinator.check_update, coordinator.try_model = model.check, self._try
        self.make_release: MakeRelease | None = None
        self._release_considered: int | None = None
        self._quality: Evaluation | None = None
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
            self._coordinator.keep_flights()
        except Exception as error:  # the server raises it when it ends
            self.failure = plain(error, self._coordinator.store.folder)
            self._on_failure()

    def turn(self) -> None:
        """Do the work that the rounds are ready for, if any."""
        coordinator, rounds = self._coordinator, self._coordinator.rounds
        coordinator.forget_absent()
        coordinator.void_late_secrets()
        coordinator.released.refresh(coordinator.key)
        release_to_all_if_taken(coordinator.store, coordinator.released)
        coordinator.minute_log.flush()
        with coordinator.lock:
            spoilt = is_spoilt(coordinator)
        if (spoilt and go_back(coordinator)) or go_back_as_wanted(coordinator):
            self._load_current()
        self._repeat_if_failed()
        self._take_new_settings()
        waiting = rounds.phase in ("enrolling", "aggregating") and not self._opening.is_prepared()
        if waiting and self._ready():
            self._opening.prepare()
        if rounds.phase == "aggregating" and rounds.present and self._opening.is_prepared():
            self._opening.open_if_ready()
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
        coordinator.keep_flights()
        if rounds.phase in ("training", "finished"):
            self._release_if_due()

    def _release_if_due(self) -> None:
        """Make the release that [release] asks for after the round that has just ended, if any.

        Meanwhile devices train the next round, or have finished.
        """
        coordinator, done = self._coordinator, self._coordinator.rounds.done
        if self.make_release is None or self._release_considered == done:
            return
        self._release_considered = done
        table = coordinator.config.release
        release = release_if_due(coordinator.store, table, done, self.make_release)
        if release is not None:
            text = f"Release {release.number}, the model after round {release.round}, is offered."
            coordinator.notify("release-made", text, release=release.number)

    def _judge_last(self) -> None:
        """Let devices judge the model of the last round, for which no round follows."""
        coordinator, rounds = self._coordinator, self._coordinator.rounds
        if rounds.judges and not self._opening.is_prepared():
            try:
                self._opening.prepare()
            except EdgeTailorError as error:  # the model cannot be used
                logger.warning("Devices cannot judge the model of the last round: %s", error)
                rounds.judges.clear()
        if not judging_is_over(coordinator):
            return
        figure = last_figure(coordinator)
        self._when_room(partial(coordinator.store.judge_last, figure))
        data = coordinator.store.model()
        assert data is not None
        self._when_room(partial(self._publish, data))
        if figure is not None:
            logger.info("The last model: %s.", figure.text())
        self._log_end()
        coordinator.store.remove_unnamed()

    def _repeat_if_failed(self) -> None:
        """Open the round again if too few updates came before its deadline."""
        coordinator, rounds = self._coordinator, self._coordinator.rounds
        with coordinator.lock:
            if not rounds.failed(coordinator.clock()):
                return
            round_, received, needed = rounds.round, len(rounds.updates), rounds.needed
            rounds.reopen()
            coordinator.store.open_round.end()
        text = (
            f"Round {round_}: {counted(received, 'update')} came before its deadline, but a "
            f"round needs at least {needed}. The round stays open for {rounds.deadline_s:g} s "
            "more. The updates that have come count."
        )
        self._say_stalled(text, updates=received, needed=needed)

    def _say_stalled(self, text: str, **values: int) -> None:
        """Tell the operator that the round opens again; later repetitions are told less often."""
        self._coordinator.missed_deadlines += 1
        times = self._coordinator.missed_deadlines
        if times in OFTEN:
            text += f" It was opened again {times} times." if times > 1 else ""
            logger.warning(text)
            self._coordinator.notify("round-stalled", text, **values)

    def _take_new_settings(self) -> None:
        """Let new settings take effect if their round is the next one."""
        model = model_for_new_settings(self._coordinator)
        if model is None:
            return
        self._model = model
        self._opening.take_model(model)
        self._coordinator.check_update = model.check
        self._load_current()

    def _load_current(self) -> None:
        """Load and publish the model that the next round starts from."""
        store = self._coordinator.store
        self._model.load(current_state(store, self._model))
        data = store.model()  # still the earlier model if `model` was changed
        assert data is not None
        self._when_room(partial(self._publish, data))

    def _try(self, model: Model) -> None:
        """Raise EdgeTailorError unless `model` can be evaluated, as after each round."""
        if self._held_out is None:
            model.check_weights()
        else:
            _check_finite(model.evaluation(*self._held_out).loss)

    def _pause_judged(self) -> None:
        if judges(self._coordinator, self._held_out):
            pause_judged(self._coordinator)

    def resume(self) -> None:
        """Load and publish the latest model. A new federation saves and publishes its first."""
        if self._coordinator.store.history.current_round() is not None:
            self._load_current()
            rounds = self._coordinator.rounds
            self._pause_judged()
            if not rounds.over:
                current = self._coordinator.store.history.current_round()
                origin = f" from the model of round {current}" if current != rounds.done else ""
                logger.info(
                    "Continuing with %s%s.", round_of(rounds.done + 1, rounds.total), origin
                )
            self._log_end()
        else:
            self._check_initial()
            self._keep(self._result(0, 0, {}, {}))

    def _fold(self) -> None:
        coordinator = self._coordinator
        round_ = coordinator.rounds.round
        sums = None
        if coordinator.sums is not None:
            sums = self._closed_sums(round_)
            if sums is None:
                return
        received = counts_of_updates(coordinator, round_)
        folding = self._folding(round_, sums)
        updates = folding.run()
        for device, reason in folding.left_out.items():
            if sums is not None and device in sums.failed:
                continue  # already logged
            if coordinator.minute_log.begins(f"{device} {round_}", LEFT_OUT):
                logger.warning("Round %d: left out the update of %s: %s", round_, device, reason)
        # The counts of a device whose update is unusable are not trusted either.
        trusted = {d: counts for d, counts in received.items() if d not in folding.left_out}
        if updates and coordinator.config.evaluation.committee is not None:
            inside = decided_by_committee(
                coordinator, self._model, folding, trusted, self._when_room, self._stopping
            )
            if inside is None:
                return
            updates = inside
        self._quality = folding.quality
        if folding.suspect is not None:
            coordinator.store.suspicions.note_suspect(folding.suspect)
        # After the last round the same devices are asked once more. If the process is killed before
        # the result is kept, the round is aggregated again and this is repeated.
        # In asynchronous rounds, some devices have received an earlier model.
        of_newest = [c for d, c in trusted.items() if not folding.staleness.get(d)]
        figure = federated_evaluation(round_, of_newest)
        if sums is not None:
            figure = summed_evaluation(round_, sums.groups)
        staleness = _by_staleness(folding)
        result = self._result(round_, updates, folding.left_out, folding.limited, staleness)
        if self._private is not None and isinstance(folding, PrivateAggregation):
            spent = self._private.spent(round_, folding.within)
            result = replace(result, privacy=spent)
        is_last = coordinator.rounds.is_last(round_)
        spent_all = self._private is not None and not is_last and self._private.ends_with(result)
        stops = spent_all or ends_early(coordinator.store, coordinator.config, result, figure)
        if is_last or stops:
            coordinator.store.final_evaluation.begin(sorted(trusted))
        if stops:
            note_early_end(coordinator.store, coordinator.config, round_, spent_all)
        coordinator.keep_flights()
        summed = [] if sums is None else sums.devices(set(folding.left_out))
        self._keep(result, figure, staleness_text(staleness), folding.reference, summed)
        coordinator.folded(trusted, stops)
        self._pause_judged()
        if coordinator.rounds.over:
            coordinator.notify("rounds-ended", "All rounds are done.")

    def _closed_sums(self, round_: int) -> ClosedSums | None:
        """The secure sums of the closed round. None if the round opens again, or the program ends.

        Devices that are in no sum are noted.
        """
        coordinator = self._coordinator
        sums = close_sums(coordinator, self._stopping)
        if sums is None:
            return None
        with coordinator.lock:
            for device, why in sums.lost.items():
                coordinator.activity[device].missed = f"not in round {round_}: {why}"
        if sums.groups:
            for text in sums.texts():
                logger.info("Round %d: %s.", round_, text)
            return sums
        with coordinator.lock:
            coordinator.rounds.reopen()
            coordinator.store.open_round.end()
        text = f"Round {round_} opens again, because it has no secure sum."
        for submodel, why in sums.failed.items():
            text += f" {submodel}: {why.removesuffix('.')}."
        self._say_stalled(text, updates=0)
        return None

    def _folding(self, round_: int, sums: ClosedSums | None) -> RoundAggregation:
        """The object that aggregates the updates of `round_`, or its secure `sums`."""
        coordinator, store = self._coordinator, self._coordinator.store
        model, held_out, private = self._model, self._held_out, self._private
        if sums is not None:
            folding: RoundAggregation
            if private is None:
                folding = SumAggregation(model, coordinator, held_out, round_, sums.groups)
            else:
                opening = private.opening(round_)
                folding = NoisedSumAggregation(model, coordinator, held_out, opening, sums.groups)
            folding.left_out |= sums.failed
            return folding
        if private is not None:
            opening, noise = private.opening(round_), private.noise(round_)
            return PrivateAggregation(model, store, held_out, opening, noise)
        is_async = coordinator.rounds.max_staleness is not None
        bounded, judged = coordinator.config.aggregation.bounds, judges(coordinator, held_out)
        return RoundAggregation(model, store, held_out, round_, is_async, bounded, judged)

    def _log_end(self) -> None:
        rounds = self._coordinator.rounds
        if rounds.over and rounds.phase != "judging":
            model = shown(self._coordinator.config.state / MODEL)
            stays = self._coordinator.config.release.after_rounds is not None
            running = "Devices stay for releases: let this program run."
            then = running if stays else "Stop with Ctrl-C."
            logger.info("All rounds are done; global model: %s. %s", model, then)

    def _check_initial(self) -> None:
        """Evaluate the initial model. Raises EdgeTailorError if its loss is not finite.

        Without held-out samples, its weights must be finite.
        """
        if self._held_out is None:
            self._model.check_weights()
            return
        logger.info("Round 0: evaluating the initial model.")
        self._quality = self._model.evaluation(*self._held_out)
        _check_finite(self._quality.loss)

    def _result(
        self,
        round_: int,
        updates: int,
        left_out: Mapping[str, str],
        limited: Mapping[str, Limited],
        staleness: Sequence[int] = (),
    ) -> RoundResult:
        """The result of `round_`, with the quality of its model."""
        quality, rounds = self._quality, self._coordinator.rounds
        return RoundResult(
            round=round_,
            accuracy=None if quality is None else quality.accuracy,
            loss=None if quality is None else quality.loss,
            updates=updates,
            left_out=dict(left_out),
            limited=dict(limited),
            held_out=None if quality is None else quality.figures,
            asked=None if rounds.goal is None else rounds.asked,
            staleness=list(staleness),
        )

    def _keep(
        self,
        result: RoundResult,
        received: FederatedEvaluation | None = None,
        about: str = "",
        reference: Reference | None = None,
        summed: Collection[str] = (),
    ) -> None:
        """Save and publish the global model with its `result`, and log it with `about` its updates.

        `received` is the devices' judgement of the model that they received in this round.
        `reference` is for the limits of the next round. `summed` has the devices in secure sums.
        """
        data = self._model.save()
        store = self._coordinator.store
        self._when_room(partial(store.add_result, result, data, received, reference, summed))
        self._when_room(partial(self._publish, data))
        tell_round(self._coordinator, result, received, about)

    def _when_room(self, write: Callable[[], None]) -> None:
        when_room(write, self._coordinator.store, self._stopping)

    def _publish(self, model: bytes) -> None:
        """Write global.safetensors and history.json, for people and other programs."""
        store = self._coordinator.store
        publish(store.folder, model, store.history.results(), store.history.models())
        self._coordinator.round_published()


def _check_finite(loss: float) -> None:
    """Raise EdgeTailorError unless the `loss` of an initial model is finite."""
    if not is_finite(loss):
        raise EdgeTailorError(
            "The loss of the initial model is {loss}: give other `weights`, or check the "
            "`held_out` samples.",
            code="federation.diverged",
            loss=loss,
        )


def _by_staleness(folding: RoundAggregation) -> list[int]:
    """How many updates of an asynchronous round had the staleness 0, 1, ...; empty for others."""
    ages = [tau for device, tau in folding.staleness.items() if device not in folding.left_out]
    return [ages.count(tau) for tau in range(max(ages, default=-1) + 1)]
