"""Answers the requests of devices and of the operator, for any transport.

Every method may be called from any thread. Heavy work is done in `round_worker.py`.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import msgspec

from device_agent.formats.manifest import MANIFEST
from device_agent.formats.protocol.fleet import (
    ABSENT,
    LEFT,
    LEFT_OUT,
    MOST_LISTED,
    STOPPED,
    Preparation,
    RoundResult,
    Status,
)
from device_agent.formats.protocol.problems import NO_SUCH_FILE
from device_agent.formats.protocol.rounds import Progress, Work
from device_agent.formats.protocol.transfers import FileOffer
from toolkit.coordinator.database.device_registry import Device
from toolkit.coordinator.database.operator_log import PAUSED
from toolkit.coordinator.devices.coordinator_key import CoordinatorKey
from toolkit.coordinator.devices.device_activity import DeviceActivity
from toolkit.coordinator.devices.join_validation import shortened
from toolkit.coordinator.devices.planned_submodel import SubmodelPlanner
from toolkit.coordinator.federation_file.device_kinds import DeviceKind
from toolkit.coordinator.federation_file.federation_config import CoordinatorConfig
from toolkit.coordinator.operation.join_access import JoinAccess
from toolkit.coordinator.operation.key_actions import KeyActions
from toolkit.coordinator.operation.metrics import Metrics
from toolkit.coordinator.operation.model_actions import ModelActions
from toolkit.coordinator.operation.operator_access import OperatorAccess
from toolkit.coordinator.operation.operator_sessions import OperatorSessions
from toolkit.coordinator.operation.overview import Overviews
from toolkit.coordinator.operation.round_actions import RoundActions
from toolkit.coordinator.operation.secret_actions import SecretActions
from toolkit.coordinator.operation.settings_actions import SettingsActions
from toolkit.coordinator.refusals import RefusalError
from toolkit.coordinator.requests.release_reports import ReleaseAnswers
from toolkit.coordinator.requests.uploads import Uploads
from toolkit.coordinator.rounds.early_stopping import ended_early
from toolkit.coordinator.rounds.poll_interval import PollInterval
from toolkit.coordinator.rounds.round_state import Flight, Rounds
from toolkit.coordinator.rounds.upload_validation import is_finite
from toolkit.coordinator.storage.coordinator_store import Bundle, Store

STARTED = "started"
"""The key in the store that says that the first round has opened."""
MOST_HISTORY = 1000
"""The status lists only this many rounds, so that it stays small in an endless federation."""


class _Offer:
    """The work of the devices that train `bundle`, signed with `key`, also as JSON."""

    def __init__(self, bundle: Bundle, work: Work, key: CoordinatorKey) -> None:
        self.bundle, self.work, self.key = bundle, work, key
        self.encoded = msgspec.json.encode(work)


@dataclass
class Coordinator(
    SecretActions,
    Overviews,
    RoundActions,
    JoinAccess,
    OperatorAccess,
    KeyActions,
    SettingsActions,
    ModelActions,
    Metrics,
    Uploads,
    ReleaseAnswers,
):
    """One federation: the work of its devices, and its status.

    Attributes:
        poll_interval: Says when a waiting device asks again.
        sessions: The logins at the operator's page.
        cookie: The name of the sessions' cookie. Each federation of a host has its own name.
    """

    poll_interval: PollInterval = field(init=False, repr=False)
    sessions: OperatorSessions = field(default_factory=OperatorSessions, repr=False)
    cookie: str = field(init=False, repr=False)
    _offers: dict[tuple[int, str], _Offer] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.poll_interval = PollInterval(self.clock)
        self.cookie = f"edgetailor-{(self.store.value('id') or '')[:8]}"

    def work(self, device: Device) -> Work:
        """Return what `device` should do now."""
        with self.lock:
            if device.id in self.rounds.stopped:
                self.resume(device)
            task = self.rounds.task(device.id)
            if task == "wait" or task == "finished":
                return self._nothing_to_train(device, task)
            return self._asking_for_secret(device, self._offer(device, task).work)

    def work_at_once(self, device: Device) -> bytes | None:
        """Return what `device` should do now, as JSON; None if the caller would have to wait.

        Every poll of a large fleet calls this method, in the thread that all requests share.
        """
        if not self.lock.acquire(blocking=False):
            return None
        try:
            task = self.rounds.task(device.id)
            if device.id in self.rounds.stopped:
                return None
            if task == "wait" or task == "finished":
                return msgspec.json.encode(self._nothing_to_train(device, task))
            offer = self._offer(device, task)
            if device.id in self.secrets_due:
                return msgspec.json.encode(self._asking_for_secret(device, offer.work))
            return offer.encoded
        finally:
            self.lock.release()

    def _offer(self, device: Device, task: Literal["train", "judge"]) -> "_Offer":
        """The work of a `device` that has to train or judge. The caller holds the lock.

        The work is signed once a second for all devices of a submodel. Their work is the same, and
        the signature is the most expensive part of a poll.
        """
        submodel, now = self.submodel(device), self.wall_clock()
        round_, bundle = self.rounds.trained_round(device.id), self.offered_bundle(device)
        self.rounds.note_started(device.id)
        offer = self._offers.get((round_, submodel))
        if (
            offer is None
            or offer.bundle is not bundle
            or offer.key is not self.key
            or offer.work.issued != int(now)
        ):
            files = [FileOffer(name=n, size=e.size, sha256=e.sha256) for n, e in bundle.items()]
            work = Work(
                state=task,
                round=round_,
                files=files,
                submodel=submodel,
                inputs=self.inputs,
                evaluation=self.config.evaluation.request,
                budget_s=self.config.budget_s,
                secure=self.secure_terms if task == "train" else None,
                candidate=self.candidate is not None,
            )
            offer = _Offer(bundle, self.key.signed(work, now), self.key)
            self._offers[round_, submodel] = offer
        activity = self.activity[device.id]
        activity.round, activity.offered_key = round_, offer.key.fingerprint
        activity.judges_last = task == "judge" and self.candidate is None
        return offer

    def _nothing_to_train(self, device: Device, task: Literal["wait", "finished"]) -> Work:
        """The work of a `device` that waits or has finished. The caller holds the lock."""
        activity = self.activity[device.id]
        activity.state, activity.note = "waiting" if task == "wait" else task, None
        if device.id in self.rounds.left_out:
            activity.state, activity.note = LEFT_OUT, self.store.suspicions.left_out[device.id]
        if device.id in self.rounds.paused:
            decision = self.store.operator_log.decisions[device.id]
            activity.state, activity.note = PAUSED, decision.text()
        joined, expected = self.rounds.places
        return Work(
            state=task,
            round=self.rounds.round,
            joined=joined,
            expected=expected,
            ask_again_s=self._ask_again_s(task),
            release=self.released.offer(device),
            note=self._why_it_waits(device),
            new_secret=self.new_secret(device),
        )

    def _asking_for_secret(self, device: Device, work: Work) -> Work:
        """The `work` of `device`, with the challenge if the device needs a new secret."""
        return replace(work, new_secret=self.new_secret(device))

    def _why_it_waits(self, device: Device) -> str | None:
        """Why `device` waits: an operator's decision, or that no more updates were needed."""
        log = self.store.operator_log
        if device.id in self.rounds.paused:
            return log.decisions[device.id].text()
        if log.pause_reason is not None:
            return f"rounds paused by the operator: {log.pause_reason}"
        return self.activity[device.id].not_needed(self.rounds.done)

    def _ask_again_s(self, task: Literal["wait", "finished"]) -> float:
        """After how many seconds a device with this task asks again; 0 if it chooses the time."""
        if task == "wait":
            return self.poll_interval.seconds(self.rounds)
        after = self.config.release.after_rounds
        return 0 if after is None else self.poll_interval.spread(after)

    def file(self, device: Device, sha256: str) -> tuple[Path, int]:
        """Path and size of a file that `device` may fetch now. Raises RefusalError (404)."""
        with self.lock:
            bundle = self.offered_bundle(device)
        for entry in bundle.values():
            if entry.sha256 == sha256:
                return self.store.blobs.path(sha256), entry.size
        released = self.released.file(device, sha256)
        if released is not None:
            return released
        raise RefusalError(
            "The round with the file {file} is over, so {device} cannot fetch it.",
            status=404,
            code=NO_SUCH_FILE,
            device=device.id,
            file=sha256[:12],
        )

    def count_fetched(self, device: Device, size: int) -> None:
        """Add `size` to the bytes that `device` has fetched."""
        self.store.registry.count_bytes(device.id, fetched=size)

    def progress(self, device: Device, progress: Progress) -> None:
        """Record what `device` is doing.

        If the device pauses before it has begun a round, its owner's conditions are not met. Then
        no round waits for it.
        """
        with self.lock:
            activity, paused = self.activity[device.id], progress.state == PAUSED
            if device.id not in self.rounds.paused:
                if device.id in self.rounds.stopped and not paused:
                    self.resume(device)
                activity.state = progress.state
                activity.note = None if progress.note is None else shortened(progress.note)
                if paused and not self.rounds.has_begun(device.id):
                    self.set_aside(device.id)
            if progress.state == "downloading":  # the device has checked the signature of its work
                self.note_trusted_key(device.id, activity.offered_key)
            if progress.loss is not None and is_finite(progress.loss):
                activity.loss = progress.loss

    def close_round(self) -> list[Device]:
        """Close the open round. Returns the late devices, for which the round still waited.

        A round that has reached its goal needs no more devices, so no device is late.
        """
        with self.lock:
            round_, rounds = self.rounds.round, self.rounds
            # asynchronous: late devices go on
            left = rounds.late() if rounds.max_staleness is None else []
            enough = rounds.has_reached_goal
            late = None if enough else f"round {round_} closed before its update came"
            for device in left:
                activity = self.activity[device]
                activity.not_needed_in, activity.missed = round_ if enough else None, late
            self.not_needed = (round_, len(left) if enough else 0)
            self.rounds.close()
            for device in left:
                if self.activity[device].state == PAUSED:
                    self.set_aside(device)
        return [] if enough else [self.store.registry.device(device) for device in left]

    def note_too_old(self) -> None:
        """Note the devices whose model is too old for the next round. The caller holds the lock."""
        for device, flight in self.rounds.flights.items():
            if self.rounds.is_too_old(flight.round):
                why = f"its training of round {flight.round} was dropped: the model is too old"
                self.activity[device].missed = why

    def keep_flights(self) -> None:
        """Store which devices train in asynchronous rounds, so that they go on after a restart."""
        with self.lock:
            if self.rounds.max_staleness is not None and self.rounds.round > self.rounds.done:
                self.store.keep_flights(self.rounds.going_on())

    def folded(self, judges: Collection[str], stops: bool) -> None:
        """Record that the closed round is in the model. Devices that still train keep their files.

        `judges` will judge the last model. If `stops`, this round is the last one.
        """
        with self.lock:
            round_, rounds = self.rounds.round, self.rounds
            rounds.folded(judges, stops)
            if rounds.max_staleness is not None:
                self.earlier_bundles[round_] = self.bundles
                for old in [r for r in self.earlier_bundles if r <= round_ - rounds.max_staleness]:
                    del self.earlier_bundles[old]
            self.bundles = {}
            self._offers.clear()
            self.missed_deadlines = 0

    def begin_anew(self) -> None:
        """Let all devices start again with new bundles. The caller holds the lock."""
        self.bundles, self.earlier_bundles = {}, {}
        self.rounds.flights.clear()

    def note_preparation(self, task: str, preparation: Preparation | None) -> None:
        """Show `preparation` of `task` in the status. None means that the preparation is done."""
        with self.lock:
            if preparation is None:
                self.preparations.pop(task, None)
            else:
                self.preparations[task] = preparation

    def status(self) -> Status:
        """The status of the whole fleet, which lists the first devices only."""
        history = self.store.history.results()
        current = self.store.history.current_round()
        newest = self.released.newest
        with self.lock:
            return Status(
                state=self.rounds.phase,
                round=self.rounds.round,
                rounds=self.rounds.total or 0,
                expected_devices=self.rounds.expected,
                devices=self.device_statuses(self.store.registry.devices()[:MOST_LISTED]),
                states=self.states(),
                history=newest_rounds(history, current),
                model_round=current,
                kinds=len(self.config.devices),
                kinds_ready=sum(map(self._is_ready, self.config.devices)),
                preparing=list(self.preparations.values()),
                warnings=self.warnings(),
                closed_connections=self.closed_connections(),
                key=self.key.public,
                release=None if newest is None else newest.number,
                selected=self.selected_devices(),
                new_key=self.new_key(),
            )

    def is_ready(self) -> bool:
        """Whether devices of some kind can join now, or the rounds are over."""
        with self.lock:
            over = self.rounds.phase in ("judging", "finished")
            return over or any(map(self._is_ready, self.config.devices))

    def _is_ready(self, kind: DeviceKind) -> bool:
        """Whether a device of `kind` can join now: its bundle, or its planner, is ready."""
        if kind.planned:
            return self.planner is not None
        return kind.submodel in self.bundles or kind.submodel in self.bundles_made

    def submodels(self) -> set[str]:
        """The submodels that need a bundle in the next round, for all kinds and devices."""
        kinds = {kind.submodel for kind in self.config.devices if not kind.planned}
        return kinds | {self._submodel_of(*group) for group in self.store.registry.groups()}


def newest_rounds(history: list[RoundResult], current: int | None) -> list[RoundResult]:
    """The last MOST_HISTORY rounds of `history`, and round `current`."""
    if len(history) <= MOST_HISTORY:
        return history
    old, new = history[:-MOST_HISTORY], history[-MOST_HISTORY:]
    return [*(result for result in old if result.round == current), *new]


def restore(
    config: CoordinatorConfig,
    store: Store,
    clock: Callable[[], float],
    planner: SubmodelPlanner | None = None,
) -> Coordinator:
    """Create a coordinator in the state that `store` holds. The federation may be new."""
    done = max((result.round for result in store.history.results()), default=0)
    asked = store.final_evaluation.answers()
    rounds = Rounds(
        config.last_round,
        config.expected_devices,
        config.deadline_s,
        done=done,
        quorum=config.closing_updates,
        min_updates=config.min_updates,
        stopped_early=ended_early(store, config, done),
        max_staleness=config.oldest if config.mode == "async" else None,
    )
    rounds.left_out |= store.suspicions.left_out.keys()
    bundles = store.bundles(done + 1)
    coordinator = Coordinator(config, store, rounds, clock, planner, bundles=bundles)
    reasons = store.stopped.reasons()
    rounds.stopped = set(reasons)
    decisions = store.operator_log.decisions
    rounds.paused = {device for device, known in decisions.items() if known.outcome == PAUSED}
    for device in store.registry.devices():
        if not device.has_left:
            rounds.enrol(device.id)
        left = ABSENT if device.forgotten else LEFT
        reason, bad = reasons.get(device.id), store.suspicions.left_out.get(device.id)
        state = left if device.has_left else "enrolled" if reason is None else STOPPED
        state = state if device.has_left or bad is None else LEFT_OUT
        coordinator.activity[device.id] = DeviceActivity(
            clock(), state, note=bad or reason, told=reason
        )
        if device.id in decisions:
            activity = coordinator.activity[device.id]
            activity.note = decisions[device.id].text()
            activity.state = PAUSED if device.id in rounds.paused else activity.state
    _restore_flights(coordinator)
    # The number of devices does not tell whether the first round has opened: some may have left.
    if store.value(STARTED) is not None and rounds.phase == "enrolling":
        rounds.begin()
    if asked and rounds.phase == "finished":
        rounds.judge_again([device for device, counts in asked.items() if counts is None])
    return coordinator


def _restore_flights(coordinator: Coordinator) -> None:
    """Let devices that trained an earlier round before the restart go on with it."""
    rounds, store = coordinator.rounds, coordinator.store
    flights = store.flights() if rounds.max_staleness is not None else {}
    coordinator.earlier_bundles = {
        round_: store.bundles(round_) for round_ in set(flights.values()) if round_ <= rounds.done
    }
    for name in flights.keys() & rounds.present:
        bundles = coordinator.earlier_bundles.get(flights[name], {})
        bundle = bundles.get(coordinator.submodel(store.registry.device(name)))
        if bundle:
            rounds.flights[name] = Flight(flights[name], bundle[MANIFEST].sha256)
    rounds.started_before({name for name, round_ in flights.items() if round_ == rounds.done + 1})
