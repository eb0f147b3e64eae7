"""The coordinator behind any transport: what devices may ask, and what they get.

Every method may be called from any thread; none of them does heavy work (see conductor.py).
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from device_agent.formats.manifest import MANIFEST
from device_agent.formats.protocol import (
    JOIN_TOKEN,
    NEEDS_PROFILE,
    Fallback,
    FileOffer,
    JoinReply,
    JoinRequest,
    Progress,
    Receipt,
    Status,
    SubmodelFailure,
    Work,
)
from profiles.documents.device_profile import DeviceProfile
from profiles.text_formatting import counted
from toolkit.coordinator.devices.device_activity import DeviceActivity
from toolkit.coordinator.devices.join_proof import check_possession
from toolkit.coordinator.devices.join_validation import (
    TROUBLE_LENGTH,
    checked_machine,
    checked_name,
    checked_profile,
    shortened,
)
from toolkit.coordinator.federation_config import CoordinatorConfig, DeviceKind
from toolkit.coordinator.refusals import RefusalError, conflict, not_authorised
from toolkit.coordinator.rounds import upload_validation
from toolkit.coordinator.rounds.round_state import Rounds
from toolkit.coordinator.storage.blobs import Part
from toolkit.coordinator.storage.coordinator_store import Bundle, Store
from toolkit.coordinator.storage.device_registry import (
    TOKEN_UNKNOWN,
    USED_UP,
    Device,
    hashed,
    label,
)

logger = logging.getLogger(__name__)

STARTED = "started"
"""The key under which it is kept that the first round has opened."""


class Chooser(Protocol):
    """Plans; toolkit.coordinator.devices.submodel_assignment.Planner is one."""

    def submodel(self, kind: DeviceKind, device: DeviceProfile) -> str:
        """What a device of `kind` gets. Raises RefusalError where nothing fits it."""


@dataclass
class Coordinator:
    """One federation; `chooser` plans for devices whose kind leaves that to it.

    `lock` guards `rounds`, `bundles` and `sightings`; `changed` wakes the conductor when an update
    or the last device has come. `making` are the submodels that have their bundle already while
    those of the next round are made.
    """

    config: CoordinatorConfig
    store: Store
    rounds: Rounds
    clock: Callable[[], float] = time.monotonic
    chooser: Chooser | None = None
    operator_token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    bundles: dict[str, Bundle] = field(default_factory=dict)
    making: set[str] = field(default_factory=set)
    sightings: dict[str, DeviceActivity] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)
    changed: threading.Event = field(default_factory=threading.Event, repr=False)

    def join(self, token: str, request: JoinRequest) -> JoinReply:
        """Enrol a device, or give one that joins again its new secret.

        Raises RefusalError: 403 for a token that cannot be used, a signature that is not the key's
        and a clock that is off; 409 for a new one after the last round, one to plan for without a
        profile, or that nothing fits; 422 for a name, key, machine or profile that is none.
        """
        name = checked_name(request.name)
        machine = checked_machine(request.machine)
        check_possession(token, request, time.time())
        with self.lock:
            try:
                device, secret = self.store.registry.enrol(
                    token, name, request.public_key, machine, lambda kind: self._plan(kind, request)
                )
            except RefusalError as refusal:
                if refusal.problem.code == USED_UP and self.rounds.phase == "finished":
                    raise self._over() from None
                raise
            if device.id not in self.rounds.devices:
                self.rounds.enrol(device.id)
                self.sightings[device.id] = DeviceActivity(self.clock())
                self._tell_members(f"{label(device)} has joined")
        self.changed.set()
        return JoinReply(device=device.id, secret=secret, submodel=self.submodel(device))

    def _plan(self, name: str, request: JoinRequest) -> str | None:
        """The submodel of a new device, where it is planned. Raises RefusalError."""
        if self.rounds.phase == "finished":
            raise self._over()
        kind = self.config.kind(name)
        if not kind.planned:
            return None
        assert self.chooser is not None
        if request.profile is None:
            raise conflict(
                NEEDS_PROFILE,
                f"Devices of kind {name!r} are planned for: send `profile`, what "
                "`edgetailor-agent calibrate --json` prints.",
            )
        return self.chooser.submodel(kind, checked_profile(request.profile))

    def _over(self) -> RefusalError:
        return conflict(
            "over",
            f"This federation is over: all of its rounds ({self.rounds.total}) are done, so there "
            "is nothing left to train.",
        )

    def authenticate(self, secret: str) -> Device:
        """The device with this secret. Raises RefusalError (401) where there is none."""
        device = self.store.registry.device_with(secret)
        if device is None:
            raise self._stranger(secret)
        if device.has_left:
            raise not_authorised(f"{device.id} has left this federation: join again with a token.")
        with self.lock:
            self.sightings[device.id].at = self.clock()
        return device

    def _stranger(self, secret: str) -> RefusalError:
        """Why nobody is known by `secret`; a join token may learn what it is good for."""
        try:
            kind, places = self.store.registry.places(secret)
        except RefusalError as refusal:
            if refusal.problem.code != TOKEN_UNKNOWN:
                return refusal
            return not_authorised(
                "No device here has this secret: join again with a token of this coordinator "
                "(`edgetailor-agent join URL --token-file FILE --replace`)."
            )
        message = f"This is a join token, good for {counted(places, 'device')} of kind {kind!r}."
        return RefusalError(401, JOIN_TOKEN, message)

    def work(self, device: Device) -> Work:
        """What `device` should do now."""
        with self.lock:
            task, round_ = self.rounds.task(device.id), self.rounds.round
            bundle = self.bundles[self.submodel(device)] if task == "train" else {}
            sighting = self.sightings[device.id]
            if task == "train":
                sighting.round = round_
            else:
                sighting.state, sighting.note = "waiting" if task == "wait" else task, None
            joined, expected = self.rounds.places
        files = [FileOffer(name=n, size=e.size, sha256=e.sha256) for n, e in bundle.items()]
        return Work(state=task, round=round_, files=files, joined=joined, expected=expected)

    def file(self, device: Device, sha256: str) -> tuple[Path, int]:
        """Path and size of a file that `device` is offered now. RefusalError (404) otherwise."""
        with self.lock:
            bundle = self.bundles.get(self.submodel(device), {})
        for entry in bundle.values():
            if entry.sha256 == sha256:
                self.store.registry.count_fetched(device.id, entry.size)
                return self.store.blobs.path(sha256), entry.size
        raise RefusalError(
            404,
            "no-such-file",
            f"{device.id} is offered no file {sha256[:12]} now: the round that it was for is over.",
        )

    def progress(self, device: Device, progress: Progress) -> None:
        """Note what `device` is doing."""
        with self.lock:
            sighting = self.sightings[device.id]
            sighting.state = progress.state
            sighting.note = None if progress.note is None else shortened(progress.note)
            if progress.loss is not None and upload_validation.is_finite(progress.loss):
                sighting.loss = progress.loss

    def problem(self, device: Device, failure: SubmodelFailure) -> Fallback:
        """Note that `device` cannot train its submodel, and excuse it from the open round.

        The next round, or this one where nobody else is in it, has its kind's fallback for it, if
        the config names one. Reporting again changes nothing.
        """
        fallback, from_ = self.config.kind(device.kind).fallback, device.fallback_from
        with self.lock:
            if failure.submodel == self.submodel(device):
                self.rounds.excuse(device.id)
                if from_ is None and fallback is not None:
                    from_ = self.rounds.round + 1
                times = counted(failure.failures, "time")
                what = f"{failure.submodel} failed {times}: {failure.reason}"
                trouble = shortened(what, TROUBLE_LENGTH)
                self.store.registry.note_trouble(device.id, trouble, from_)
                if trouble != device.trouble:
                    logger.warning("%s: %s", label(device), trouble)
        self.changed.set()
        return Fallback(submodel=fallback, round=from_ or 0)

    def leave(self, device: Device) -> None:
        """Let `device` go: its secret is worth nothing from now on, and its place is free."""
        with self.lock:
            self.store.registry.leave(device.id)
            self.rounds.leave(device.id)
            self.sightings[device.id] = DeviceActivity(self.clock(), "left")
            self._tell_members(f"{label(device)} has left")
        self.changed.set()

    def _tell_members(self, what: str) -> None:
        taken, places = len(self.rounds.devices), self.rounds.expected
        logger.info("%s: %d of %s taken.", what, taken, counted(places, "place"))

    def receive(self, device: Device, round_: int) -> Part:
        """A place for the tensors of `device`, limited to what its bundle can need.

        Raises RefusalError (409) where the round takes none.
        """
        with self.lock:
            self.rounds.check_round(device.id, round_)
            manifest = self._manifest(device)
        return Part(self.store.blobs.folder, upload_validation.size_limit(manifest))

    def keep(self, device: Device, part: Part) -> None:
        """Keep the tensors that were received in `part` until their update.json comes."""
        self.store.keep_upload(device.id, part)

    def take(self, device: Device, round_: int, body: bytes) -> Receipt:
        """Take the update that `body` (its update.json) describes; the same again is fine.

        Raises RefusalError: 409 for another round, another bundle, a second update or tensors that
        are not here; 422 for an update that cannot be used.
        """
        record = upload_validation.read_record(body)
        digest = hashed(body.decode())
        with self.lock:
            new = self.rounds.check(device.id, round_, record.bundle, digest)
            manifest = self._manifest(device)
        if new:
            uploaded = self.store.upload(device.id)
            upload_validation.check_upload(device.id, record, manifest, uploaded, self.store.blobs)
            with self.lock:
                self.rounds.check(device.id, round_, record.bundle, digest)
                self.store.add_update(round_, device.id, record.file.sha256, body)
                self.rounds.take(device.id, round_, record.bundle, digest)
                sighting = self.sightings[device.id]
                sighting.loss, sighting.missed = record.loss_last, None
            self.changed.set()
        return Receipt(round=round_)

    def close(self) -> None:
        """Close the open round; whoever it still waits for has missed its deadline."""
        round_ = self.rounds.round
        for device in self.store.registry.members():
            if self.rounds.waits_for(device.id):
                self.sightings[device.id].missed = round_
                logger.warning("%s missed the deadline of round %d.", label(device), round_)
        self.rounds.close()

    def check_operator(self, token: str) -> None:
        """Let the operator or an enrolled device pass. RefusalError (401) for others."""
        if not secrets.compare_digest(hashed(token), hashed(self.operator_token)):
            self.authenticate(token)

    def status(self) -> Status:
        """The whole fleet, now."""
        trained = self.store.rounds_trained()
        devices, now = self.store.registry.devices(), self.clock()
        with self.lock:
            return Status(
                state=self.rounds.phase,
                round=self.rounds.round,
                rounds=self.rounds.total,
                expected_devices=self.rounds.expected,
                devices=[
                    self.sightings[d.id].told(d, self.submodel(d), trained.get(d.id, 0), now)
                    for d in devices
                ],
                history=self.store.history(),
                kinds=len(self.config.devices),
                kinds_ready=sum(
                    kind.planned or kind.submodel in self.bundles or kind.submodel in self.making
                    for kind in self.config.devices
                ),
            )

    def submodels(self) -> set[str]:
        """Those of which the next round needs bundles: every kind's and every device's."""
        kinds = {kind.submodel for kind in self.config.devices if not kind.planned}
        return kinds | {self.submodel(device) for device in self.store.registry.members()}

    def submodel(self, device: Device) -> str:
        """What `device` trains in the round that is open or opens next."""
        kind = self.config.kind(device.kind)
        replaced = device.fallback_from is not None and self.rounds.done + 1 >= device.fallback_from
        if replaced and kind.fallback is not None:
            return kind.fallback
        return device.submodel or kind.submodel

    def _manifest(self, device: Device) -> bytes:
        entry = self.bundles[self.submodel(device)][MANIFEST]
        return self.store.blobs.path(entry.sha256).read_bytes()


def restore(
    config: CoordinatorConfig,
    store: Store,
    clock: Callable[[], float],
    chooser: Chooser | None = None,
) -> Coordinator:
    """The coordinator as `store` knows it: new, or where it was when it stopped."""
    done = max((result.round for result in store.history()), default=0)
    rounds = Rounds(config.rounds, config.expected_devices, config.deadline_s, done)
    bundles = store.bundles(done + 1)
    coordinator = Coordinator(config, store, rounds, clock, chooser, bundles=bundles)
    for device in store.registry.devices():
        if not device.has_left:
            rounds.enrol(device.id)
        state = "left" if device.has_left else "enrolled"
        coordinator.sightings[device.id] = DeviceActivity(clock(), state)
    if store.known(STARTED) is not None and rounds.phase == "enrolling":
        rounds.begin()
    return coordinator
