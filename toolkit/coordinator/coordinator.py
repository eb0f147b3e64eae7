"""The requests of devices and of the operator, behind any transport.

Every method may be called from any thread. None of them does heavy work: see `round_worker.py`.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import UnsetType

from device_agent.formats.input_summary import far_off
from device_agent.formats.manifest import MANIFEST, encode
from device_agent.formats.protocol import (
    ABSENT,
    DIVERGED,
    LEFT,
    LEFT_OUT,
    NO_SUCH_FILE,
    NOT_AUTHORISED,
    STOPPED,
    Fallback,
    FileOffer,
    InputSummary,
    Invitation,
    JoinReply,
    JoinRequest,
    Preparation,
    Progress,
    Receipt,
    Status,
    Stopped,
    SubmodelFailure,
    Upload,
    Work,
)
from device_agent.formats.update import UpdateRecord
from profiles.text_formatting import counted
from toolkit.coordinator.devices.coordinator_key import CoordinatorKey
from toolkit.coordinator.devices.device_activity import DeviceActivity
from toolkit.coordinator.devices.join_proof import VALID_S, check_possession, used_join
from toolkit.coordinator.devices.join_validation import (
    TROUBLE_LENGTH,
    check_machine,
    check_name,
    shortened,
)
from toolkit.coordinator.devices.planned_submodel import SubmodelPlanner, planned_submodel
from toolkit.coordinator.devices.wrong_credentials import operator_joins, unknown_secret
from toolkit.coordinator.federation_config import CoordinatorConfig, DeviceKind
from toolkit.coordinator.minute_log import MinuteLog
from toolkit.coordinator.refusals import RefusalError, conflict
from toolkit.coordinator.rounds import upload_validation
from toolkit.coordinator.rounds.asking_again import AskingAgain
from toolkit.coordinator.rounds.expected_traffic import round_traffic
from toolkit.coordinator.rounds.falling_quality import falling
from toolkit.coordinator.rounds.round_state import Rounds
from toolkit.coordinator.storage.coordinator_store import Bundle, Store
from toolkit.coordinator.storage.device_registry import (
    USED_UP,
    Device,
    hashed,
    label,
)
from toolkit.coordinator.storage.incoming_files import IncomingFile

logger = logging.getLogger(__name__)

CODE_LENGTH = 64
"""Most characters of a code that a device reports."""
MEMBERSHIP = "{more} devices have joined or left."
TROUBLES = "{more} reports of trouble from {who}."
STOPS = "{who} has stopped {more} times."
STARTED = "started"
"""The key in the store that says that the first round has opened."""


class _Offer:
    """Signed work for the devices that train `bundle`, and its JSON."""

    def __init__(self, bundle: Bundle, work: Work) -> None:
        self.bundle, self.work = bundle, work
        self.encoded = msgspec.json.encode(work)


@dataclass
class Coordinator:
    """One federation.

    Attributes:
        config: The federation's file.
        store: The state that survives a restart.
        rounds: The state of the rounds.
        clock: Seconds of a clock that never jumps.
        wall_clock: Seconds since 1970.
        planner: Assigns submodels to devices of `auto` kinds. None while it is being made.
        operator_token: Admits the operator to `status`.
        key: Signs the work of devices.
        bundles: The bundles of the next or open round, by submodel.
        bundles_made: Submodels of the next round whose bundle is made, before all of them are.
        preparations: What is being made now, by task.
        activity: What each device was last seen doing.
        lock: Protects `rounds`, `bundles`, `bundles_made`, `preparations` and `activity`.
        changed: Wakes the round worker, for example after an update.
        closed_connections: How many were closed because there were too many.
        minute_log: Bounds what devices and strangers can make the log say.
        inputs: What the held-out samples are like, which devices compare theirs with.
        asking_again: Says when a waiting device asks again.
    """

    config: CoordinatorConfig
    store: Store
    rounds: Rounds
    clock: Callable[[], float] = time.monotonic
    planner: SubmodelPlanner | None = None
    operator_token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    key: CoordinatorKey = field(default_factory=CoordinatorKey, repr=False)
    bundles: dict[str, Bundle] = field(default_factory=dict)
    bundles_made: set[str] = field(default_factory=set)
    preparations: dict[str, Preparation] = field(default_factory=dict)
    activity: dict[str, DeviceActivity] = field(default_factory=dict)
    wall_clock: Callable[[], float] = time.time
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)
    changed: threading.Event = field(default_factory=threading.Event, repr=False)
    closed_connections: Callable[[], int] = lambda: 0
    minute_log: MinuteLog = field(default_factory=MinuteLog, repr=False)
    inputs: InputSummary | None = None
    asking_again: AskingAgain = field(init=False, repr=False)
    _offers: dict[str, _Offer] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.asking_again = AskingAgain(self.clock)

    def check_join_token(self, token: str) -> None:
        """Raise RefusalError (403) unless `token` is one of this federation's join tokens."""
        if self.is_operator(token):
            raise operator_joins(self.config.devices)
        self.store.registry.check_token(token)

    def invitation(self, token: str) -> Invitation:
        """What the holder of this join token is asked to take part in."""
        config = self.config
        kind = config.kind(self.store.registry.kind(token))
        with self.lock:
            bundle = self.bundles.get(kind.submodel, {})
        return self.key.invites(
            Invitation(
                title=config.title,
                purpose=config.purpose,
                contact=config.contact,
                rounds=config.rounds,
                round_s=config.deadline_s,
                **round_traffic(bundle, self.store.blobs),
            )
        )

    def join(self, token: str, request: JoinRequest) -> JoinReply:
        """Enrol a device, or give one that joins again a new secret.

        Raises:
            RefusalError: 403 for an unusable token, a wrong signature or clock, or a request that
                was used before. 409 for a new device after the last round, for one without a
                profile that needs one, and for one that no submodel fits. 422 for a malformed name,
                key, machine or profile. 503 for one that needs a plan while the planner is being
                made.
        """
        self.check_join_token(token)
        name = check_name(request.name)
        machine = check_machine(request.machine)
        now = time.time()
        signed = check_possession(token, request, now)
        with self._saying_if_finished():
            ahead = self._plan_ahead(token, request)
        with self.lock:
            if not self.store.used_joins.take(signed, now, VALID_S):
                raise used_join()
            with self._saying_if_finished():
                device, secret = self.store.registry.enrol(
                    *(token, name, request.public_key, machine),
                    lambda kind: ahead[kind] if kind in ahead else self._plan(kind, request),
                )
            if device.id not in self.rounds.devices:
                self._enter(device, "has joined")
        self.changed.set()
        submodel, key = self.submodel(device), self.key.public
        data = self.config.data
        return JoinReply(
            device=device.id,
            secret=secret,
            submodel=submodel,
            key=key,
            preprocessing=None if data is None else msgspec.to_builtins(data),
            sample_shape=list(self.config.input_shape),
            label_type=self.config.training.labels.dtype,
        )

    def _plan_ahead(self, token: str, request: JoinRequest) -> dict[str, str | None]:
        """The submodel of a new device, by the kind of its token; empty for a known device.

        It is called without the lock: a plan may take long, and other devices poll meanwhile.
        """
        kind = self.store.registry.kind_if_new(token, request.public_key)
        return {} if kind is None else {kind: self._plan(kind, request)}

    @contextmanager
    def _saying_if_finished(self) -> Iterator[None]:
        """Refuse a new device because the rounds are over, rather than because no place is free."""
        try:
            yield
        except RefusalError as refusal:
            if refusal.code == USED_UP and self.rounds.phase == "finished":
                raise self._finished() from None
            raise

    def _plan(self, kind_name: str, request: JoinRequest) -> str | None:
        """The submodel planned for a new device; None if its kind names one."""
        if self.rounds.phase == "finished":
            raise self._finished()
        kind = self.config.kind(kind_name)
        return planned_submodel(kind, request.profile, self.planner) if kind.planned else None

    def _finished(self) -> RefusalError:
        return conflict(
            "This federation is over: all of its rounds ({rounds}) are done, so there is nothing "
            "left to train.",
            code="federation.finished",
            rounds=self.rounds.total,
        )

    def authenticate(self, secret: str) -> Device:
        """The device with this secret. Raises RefusalError (401) if there is none."""
        device = self.store.registry.device_with(secret)
        if device is None:
            raise unknown_secret(secret, self.store.registry)
        if device.has_left:
            device = self._back(device)
        self.note_seen(device)
        return device

    def member_with(self, secret: str) -> Device | None:
        """The member with this secret, found without waiting for anything; None if there is none.

        A device that has left may come back: `authenticate` knows.
        """
        device = self.store.registry.device_with(secret)
        if device is None or device.has_left:
            return None
        self.note_seen(device)
        return device

    def note_seen(self, device: Device) -> None:
        """Note that a request of `device` came."""
        self.activity[device.id].seen_at = self.clock()  # one assignment: it needs no lock

    def _back(self, device: Device) -> Device:
        """A forgotten `device`, a member again. Raises RefusalError (401) if it cannot be one."""
        again = "join again with a token"
        if not device.forgotten:
            raise RefusalError(
                "{device} has left this federation: {remedy}.",
                status=401,
                code=NOT_AUTHORISED,
                device=device.id,
                remedy=again,
            )
        with self.lock:
            if not self.store.registry.come_back(device.id):
                raise RefusalError(
                    "{device} was not seen for so long that another device has its place: "
                    "{remedy}.",
                    status=401,
                    code=NOT_AUTHORISED,
                    device=device.id,
                    remedy=again,
                )
            self._enter(device, "is back")
        self.changed.set()
        return self.store.registry.device(device.id)

    def _enter(self, device: Device, what: str) -> None:
        self.rounds.enrol(device.id)
        self.activity[device.id] = DeviceActivity(self.clock())
        self._log_membership(device, what)

    def work(self, device: Device) -> Work:
        """What `device` should do now."""
        with self.lock:
            if device.id in self.rounds.stopped:
                self._resume(device)
            task = self.rounds.task(device.id)
            if task != "train":
                return self._nothing_to_train(device, task)
            return self._offer(device).work

    def work_at_once(self, device: Device) -> bytes | None:
        """The same as JSON; None if that takes time.

        It is called for every poll of a large fleet, in the thread that all requests share.
        """
        if not self.lock.acquire(blocking=False):
            return None
        try:
            task = self.rounds.task(device.id)
            if device.id in self.rounds.stopped:
                return None
            if task == "train":
                return self._offer(device).encoded
            return msgspec.json.encode(self._nothing_to_train(device, task))
        finally:
            self.lock.release()

    def _offer(self, device: Device) -> "_Offer":
        """The work of a `device` that has to train; needs the lock.

        It is signed once a second for all devices of a submodel: the work is the same for all, and
        a signature costs more than all else of a poll.
        """
        submodel, round_, now = self.submodel(device), self.rounds.round, self.wall_clock()
        bundle, offer = self.bundles[submodel], self._offers.get(submodel)
        if offer is None or offer.bundle is not bundle or offer.work.issued != int(now):
            files = [FileOffer(name=n, size=e.size, sha256=e.sha256) for n, e in bundle.items()]
            work = Work(
                state="train", round=round_, files=files, submodel=submodel, inputs=self.inputs
            )
            offer = self._offers[submodel] = _Offer(bundle, self.key.signed(work, now))
        self.activity[device.id].round = round_
        return offer

    def _nothing_to_train(self, device: Device, task: Literal["wait", "finished"]) -> Work:
        """The work of a `device` that waits or has finished; needs the lock."""
        activity = self.activity[device.id]
        activity.state, activity.note = "waiting" if task == "wait" else task, None
        if device.id in self.rounds.left_out:
            activity.state, activity.note = LEFT_OUT, self.store.suspicions.left_out[device.id]
        joined, expected = self.rounds.places
        return Work(
            state=task,
            round=self.rounds.round,
            joined=joined,
            expected=expected,
            ask_again_s=self.asking_again.seconds(self.rounds) if task == "wait" else 0,
        )

    def file(self, device: Device, sha256: str) -> tuple[Path, int]:
        """Path and size of a file that `device` is offered now. Raises RefusalError (404)."""
        with self.lock:
            bundle = self.bundles.get(self.submodel(device), {})
        for entry in bundle.values():
            if entry.sha256 == sha256:
                return self.store.blobs.path(sha256), entry.size
        raise RefusalError(
            "{device} is offered no file {file} now: its round is over.",
            status=404,
            code=NO_SUCH_FILE,
            device=device.id,
            file=sha256[:12],
        )

    def count_fetched(self, device: Device, size: int) -> None:
        """Add `size` to the bytes that `device` has fetched."""
        self.store.registry.count_bytes(device.id, fetched=size)

    def progress(self, device: Device, progress: Progress) -> None:
        """Note what `device` is doing."""
        with self.lock:
            activity = self.activity[device.id]
            activity.state = progress.state
            activity.note = None if progress.note is None else shortened(progress.note)
            if progress.loss is not None and upload_validation.is_finite(progress.loss):
                activity.loss = progress.loss

    def submodel_failed(self, device: Device, failure: SubmodelFailure) -> Fallback:
        """Note that `device` cannot train its submodel, and stop waiting for it in this round.

        From the next round on the device gets the fallback of its kind, if the config names one.
        If no other device is in the open round, that round opens again with the fallback. Repeating
        the report changes nothing. A training that diverged needs no smaller submodel.
        """
        fallback, from_ = self.config.kind(device.kind).fallback, device.fallback_from
        diverged = failure.code in DIVERGED
        with self.lock:
            if failure.submodel == self.submodel(device):
                times = counted(failure.failures, "time")
                trouble = f"{failure.submodel} failed {times}: {failure.reason}"
                if diverged and failure.round in (0, self.rounds.round):
                    self.rounds.note_diverged(device.id)
                # What it says now is newer than that an earlier round closed without it.
                self.activity[device.id].missed = None
                from_ = self.excuse(device, trouble, shrink=not diverged)
        self.changed.set()
        return Fallback(submodel=None if from_ is None else fallback, round=from_ or 0)

    def excuse(self, device: Device, trouble: str, shrink: bool = True) -> int | None:
        """Stop waiting for `device` in the open round because of `trouble`; needs the lock.

        With `shrink` it gets the fallback of its kind. Returns the first round with that, or None.
        """
        from_ = device.fallback_from
        if self.rounds.waits_for(device.id):
            self.store.open_round.note_failure(self.rounds.round, device.id)
        self.rounds.excuse(device.id)
        self._note_reopening()
        if shrink and from_ is None and self.config.kind(device.kind).fallback is not None:
            from_ = self.rounds.round + 1
        trouble = shortened(trouble, TROUBLE_LENGTH)
        self.store.registry.note_trouble(device.id, trouble, from_)
        about = f"{device.id} ({self.submodel(device)})"
        if trouble != device.trouble and self.minute_log.begins(about, TROUBLES):
            logger.warning("%s: %s", label(device), trouble)
        return from_

    def stopped(self, device: Device, stopped: Stopped) -> None:
        """Note that `device` ends its work. No round waits for it until it asks for work again."""
        reason = shortened(stopped.reason, TROUBLE_LENGTH)
        with self.lock:
            activity = self.activity[device.id]
            activity.state, activity.note = STOPPED, reason
            self.rounds.stop(device.id)
            self.store.stopped.note(device.id, reason)
            self._note_reopening()
            told, activity.told = activity.told, reason
        # A service that is started again and again for the same end is one line.
        if reason != told and self.minute_log.begins(device.id, STOPS):
            code = shortened(stopped.code, CODE_LENGTH)
            logger.warning("%s has stopped: %s (%s)", label(device), reason, code)
        self.changed.set()

    def _resume(self, device: Device) -> None:
        """Count on a `device` that had stopped, also in the open round; needs the lock."""
        bundle = self.bundles.get(self.submodel(device), {})
        failed = device.id in self.store.open_round.failures(self.rounds.round)
        offer = bundle[MANIFEST].sha256 if bundle and not failed else None
        self.rounds.resume(device.id, offer)
        self.activity[device.id].state, self.activity[device.id].note = "waiting", None
        self.store.stopped.forget(device.id)
        self.changed.set()

    def _note_reopening(self) -> None:
        """Give the open round a new deadline if nobody is left in it: it opens again."""
        if self.rounds.phase == "aggregating" and not self.rounds.updates:
            self.store.open_round.end()

    def leave(self, device: Device) -> None:
        """End the membership of `device`: its secret is void and its place is free."""
        with self.lock:
            self._remove(device)
            self.activity[device.id] = DeviceActivity(self.clock(), LEFT)
            self._log_membership(device, "has left")
            for dropped in self.store.registry.drop_left(device.kind):
                del self.activity[dropped]
        self.changed.set()

    def forget_absent(self) -> None:
        """Free the places of the devices that were not seen for the time that the config allows.

        One that comes back later is a member again, if a place is free then.
        """
        limit = self.config.forget_after
        if limit is None:
            return
        with self.lock:
            oldest = self.clock() - limit
            for name in [n for n in self.rounds.devices if self.activity[n].seen_at < oldest]:
                device = self.store.registry.device(name)
                self._remove(device, forgotten=True)
                self.activity[name].state, self.activity[name].note = ABSENT, None
                self._log_membership(device, "was not seen for long and lost its place")

    def _remove(self, device: Device, forgotten: bool = False) -> None:
        """End the membership of `device`; needs the lock."""
        self.store.registry.leave(device.id, forgotten)
        self.rounds.leave(device.id)
        self.store.stopped.forget(device.id)
        self.store.incoming.drop(device.id)
        self._note_reopening()

    def _log_membership(self, device: Device, what: str) -> None:
        if not self.minute_log.begins(f"{device.id} {what}", MEMBERSHIP):
            return
        taken, places = len(self.rounds.devices), self.config.places
        of = counted(taken, "place") if places is None else f"{taken} of {counted(places, 'place')}"
        logger.info("%s %s: %s taken.", label(device), what, of)

    def upload(self, device: Device, round_: int, sha256: str) -> Upload:
        """How much of the tensors with this hash has come. Ends a request that still sends them.

        Raises RefusalError (409) if the round takes no update from this device.
        """
        self._check_round(device, round_)
        # Read again: a file that the disk damaged has to be sent once more.
        complete = self.store.upload(device.id) == sha256 and self.store.blobs.is_whole(sha256)
        received = 0 if complete else self.store.incoming.received(device.id, sha256)
        return Upload(received=received, complete=complete)

    def open_upload(self, device: Device, round_: int, sha256: str, offset: int) -> IncomingFile:
        """The file for the tensors of `device` after their first `offset` bytes.

        It is limited to what the device's bundle can need. Raises RefusalError (409) if the round
        takes no update from this device, or if other than `offset` bytes have come.
        """
        with self.lock:
            self.rounds.check_round(device.id, round_)
            manifest = self._manifest(device)
        limit = upload_validation.size_limit(manifest)
        return self.store.incoming.open(device.id, sha256, offset, limit)

    def keep_upload(self, device: Device, round_: int, received: IncomingFile) -> None:
        """Keep the received tensors until their update.json comes.

        Raises RefusalError (409) if they were altered, or if the round has closed.
        """
        self._check_round(device, round_)
        self.store.keep_upload(device.id, received)

    def _check_round(self, device: Device, round_: int) -> None:
        with self.lock:
            self.rounds.check_round(device.id, round_)

    def take_update(self, device: Device, round_: int, body: bytes) -> Receipt:
        """Take the update that `body` (its update.json) describes. It may be sent again.

        Raises:
            RefusalError: 409 for another round, another bundle, a second update or tensors that
                were not sent. 422 for an update that cannot be used.
        """
        record = upload_validation.read_record(body)
        digest = hashed(encode(record).decode())
        with self.lock:
            new = self.rounds.check(device.id, round_, record.bundle, digest)
            manifest = self._manifest(device)
        if new:
            with self.store.checking(device.id) as sent:
                # Without the lock, because it reads the whole file: hence the second `check`.
                upload_validation.check_upload(device.id, record, manifest, sent, self.store.blobs)
                with self.lock:
                    self.rounds.check(device.id, round_, record.bundle, digest)
                    self.store.add_update(round_, device.id, record)
                    self.rounds.take(device.id, round_, record.bundle, digest)
                    activity = self.activity[device.id]
                    activity.loss, activity.missed = record.loss_last, None
                    activity.told = None
                    self._compare_inputs(device, record)
            self.changed.set()
        return Receipt(round=round_)

    def _compare_inputs(self, device: Device, record: UpdateRecord) -> None:
        """Note how the inputs of `device` differ from the coordinator's samples; needs the lock."""
        found = None
        if self.inputs is not None and not isinstance(record.inputs, UnsetType):
            found = far_off(record.inputs, self.inputs)
        activity = self.activity[device.id]
        before, activity.inputs = activity.inputs, found and f"its inputs lie far off: {found}"
        if activity.inputs not in (None, before):
            logger.warning(
                "%s: %s (`held_out`). Check the unit of its sensor.", label(device), activity.inputs
            )

    def close_round(self) -> list[Device]:
        """Close the open round. Returns the devices without an update: they missed its deadline."""
        with self.lock:
            late = self.rounds.late()
            for device in late:
                self.activity[device].missed = self.rounds.round
            self.rounds.close()
        return [self.store.registry.device(device) for device in late]

    def is_operator(self, token: str) -> bool:
        """Whether `token` is the operator's, which admits to `status`."""
        return secrets.compare_digest(hashed(token), hashed(self.operator_token))

    def note_preparation(self, task: str, preparation: Preparation | None) -> None:
        """Show in the status what is being made for `task`; None when it is done."""
        with self.lock:
            if preparation is None:
                self.preparations.pop(task, None)
            else:
                self.preparations[task] = preparation

    def status(self) -> Status:
        """The whole fleet, now."""
        trained = self.store.rounds_trained()
        devices, now = self.store.registry.devices(), self.clock()
        history = self.store.history()
        current = self.store.current_round()
        warnings = [one for one in [falling(history)] if one is not None]
        warnings += self.store.suspicions.spoilt(history[-1].round if history else 0)
        with self.lock:
            return Status(
                state=self.rounds.phase,
                round=self.rounds.round,
                rounds=self.rounds.total,
                expected_devices=self.rounds.expected,
                devices=[
                    self.activity[d.id].status(
                        d, self.submodel(d), trained.get(d.id, 0), now, history[-1:]
                    )
                    for d in devices
                ],
                history=history,
                model_round=current,
                kinds=len(self.config.devices),
                kinds_ready=sum(map(self._is_ready, self.config.devices)),
                preparing=list(self.preparations.values()),
                warnings=warnings,
                closed_connections=self.closed_connections(),
                key=self.key.public,
            )

    def _is_ready(self, kind: DeviceKind) -> bool:
        """Whether a device of `kind` that joins now finds a bundle or a planner."""
        if kind.planned:
            return self.planner is not None
        return kind.submodel in self.bundles or kind.submodel in self.bundles_made

    def submodels(self) -> set[str]:
        """The submodels whose bundles the next round needs: every kind's and every device's."""
        kinds = {kind.submodel for kind in self.config.devices if not kind.planned}
        return kinds | {self._submodel_of(*group) for group in self.store.registry.groups()}

    def submodel(self, device: Device) -> str:
        """The submodel of `device` in the round that is open or opens next."""
        return self._submodel_of(*device.group)

    def _submodel_of(self, kind_name: str, planned: str | None, fallback_from: int | None) -> str:
        """The submodel of the devices of one group."""
        kind = self.config.kind(kind_name)
        replaced = fallback_from is not None and self.rounds.done + 1 >= fallback_from
        if replaced and kind.fallback is not None:
            return kind.fallback
        return planned or kind.submodel

    def _manifest(self, device: Device) -> bytes:
        entry = self.bundles[self.submodel(device)][MANIFEST]
        return self.store.blobs.path(entry.sha256).read_bytes()


def restore(
    config: CoordinatorConfig,
    store: Store,
    clock: Callable[[], float],
    planner: SubmodelPlanner | None = None,
) -> Coordinator:
    """The coordinator in the state of `store`: a new one, or one that continues."""
    done = max((result.round for result in store.history()), default=0)
    rounds = Rounds(
        *(config.rounds, config.expected_devices, config.deadline_s),
        done=done,
        quorum=config.quorum,
        min_updates=config.min_updates,
    )
    rounds.left_out |= store.suspicions.left_out.keys()
    bundles = store.bundles(done + 1)
    coordinator = Coordinator(config, store, rounds, clock, planner, bundles=bundles)
    reasons = store.stopped.reasons()
    rounds.stopped = set(reasons)
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
    # Devices may have left since the first round opened: their number does not say that it has.
    if store.value(STARTED) is not None and rounds.phase == "enrolling":
        rounds.begin()
    return coordinator
