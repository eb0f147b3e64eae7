"""Devices join, come back, leave, and lose their membership if they are absent for long."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import msgspec

from device_agent.data.array_files import LABELS, SAMPLES
from device_agent.data.packed_arrays import array_names
from device_agent.formats.protocol.fleet import ABSENT, LEFT
from device_agent.formats.protocol.joining import Invitation, JoinReply, JoinRequest
from device_agent.formats.protocol.problems import JOIN_TOKEN, NOT_AUTHORISED
from profiles.text_formatting import counted
from toolkit.coordinator.database.database import Also
from toolkit.coordinator.database.device_registry import (
    TOKEN_UNKNOWN,
    USED_UP,
    Device,
    Registry,
    label,
)
from toolkit.coordinator.devices.device_activity import DeviceActivity
from toolkit.coordinator.devices.join_proof import VALID_S, check_possession, used_join
from toolkit.coordinator.devices.join_validation import check_machine, check_name
from toolkit.coordinator.devices.planned_submodel import planned_submodel
from toolkit.coordinator.federation_file.device_kinds import DeviceKind
from toolkit.coordinator.refusals import RefusalError, conflict, forbidden
from toolkit.coordinator.requests.device_secrets import DeviceSecrets
from toolkit.coordinator.rounds.expected_traffic import round_traffic

logger = logging.getLogger(__name__)

MEMBERSHIP = "{more} devices have joined or left."


class Membership(DeviceSecrets):
    """Manages which devices take part in the federation."""

    def check_join_token(self, token: str) -> None:
        """Raise RefusalError (403) unless `token` is one of this federation's join tokens."""
        if self.operator_with(token) is not None:
            raise _operator_joins(self.config.devices)
        self.store.registry.check_token(token)

    def invitation(self, token: str) -> Invitation:
        """The signed description of the federation for the holder of this join token."""
        config = self.config
        kind = config.kind(self.store.registry.kind(token))
        with self.lock:
            bundle = self.bundles.get(kind.submodel, {})
        return self.key.invites(
            Invitation(
                title=config.title,
                purpose=config.purpose,
                contact=config.contact,
                rounds=config.last_round or 0,
                round_s=config.deadline_s,
                evaluation=config.evaluation.request,
                secure=self.secure_terms,
                **round_traffic(bundle, self.store.blobs, summed=self.secure_terms is not None),
            )
        )

    def join(self, token: str, request: JoinRequest) -> JoinReply:
        """Enrol a device. A device that joins again gets a new secret.

        Raises:
            RefusalError: 403 for an unusable token, a wrong signature or clock, or a request that
                was used before. 409 in three cases: the device is new and the last round is over;
                the kind needs a profile and the request has none; no submodel fits. 422 for a
                malformed name, key, machine or profile. 503 if the device needs a plan and there is
                no planner yet.
        """
        self.check_join_token(token)
        name = check_name(request.name)
        machine = check_machine(request.machine)
        now = self.wall_clock()
        signed = check_possession(token, request, now)
        self._check_not_banned(request.public_key)
        with self._saying_if_finished():
            ahead = self._plan_ahead(token, request)
        with self.lock:
            if not self.store.used_joins.take(signed, now, VALID_S):
                raise used_join()
            self._check_not_banned(request.public_key)  # a ban may be newer than the plan
            with self._saying_if_finished():
                device, secret = self.store.registry.enrol(
                    token,
                    name,
                    request.public_key,
                    machine,
                    lambda kind: ahead[kind] if kind in ahead else self._plan(kind, request),
                )
            self.forget_due_secret(device)
            self.note_trusted_key(device.id, self.key.fingerprint)
            if device.id not in self.rounds.devices:
                self.enter(device, "has joined")
        self.changed.set()
        submodel, key = self.submodel(device), self.key.public
        data, labels = self.config.data, self.config.training.labels
        arrays = [*array_names(SAMPLES, self.config.parts), *array_names(LABELS, labels.parts)]
        return JoinReply(
            device=device.id,
            secret=secret,
            submodel=submodel,
            key=key,
            preprocessing=None if data is None else msgspec.to_builtins(data),
            sample_shape=list(self.config.input_shape),
            label_type=labels.as_read.dtype,
            arrays=[] if arrays == [SAMPLES, LABELS] else arrays,
        )

    def _check_not_banned(self, public_key: str) -> None:
        """Raise RefusalError (403) if the operator has banned the device with this key."""
        for decision in self.store.operator_log.banned(public_key).values():
            raise forbidden(
                "This device was {decision}.", code="join.banned", decision=decision.text()
            )

    def _plan_ahead(self, token: str, request: JoinRequest) -> dict[str, str | None]:
        """Map the kind of a new device to the submodel planned for it; empty for a known device.

        Called without the lock, because a plan may take long while other devices poll.
        """
        kind = self.store.registry.kind_if_new(token, request.public_key)
        return {} if kind is None else {kind: self._plan(kind, request)}

    @contextmanager
    def _saying_if_finished(self) -> Iterator[None]:
        """After the last round, replace the refusal of a used-up token by: the rounds are over."""
        try:
            yield
        except RefusalError as refusal:
            if refusal.code == USED_UP and self.rounds.phase == "finished":
                raise self._finished() from None
            raise

    def _plan(self, kind_name: str, request: JoinRequest) -> str | None:
        """The submodel planned for a new device; None if the device's kind names a submodel."""
        if self.rounds.phase == "finished":
            raise self._finished()
        kind = self.config.kind(kind_name)
        return planned_submodel(kind, request.profile, self.planner) if kind.planned else None

    def _finished(self) -> RefusalError:
        return conflict(
            "This federation is over: all of its rounds ({rounds}) are done, so there is nothing "
            "left to train.",
            code="federation.finished",
            rounds=self.rounds.done,
        )

    def authenticate(self, secret: str) -> Device:
        """The device with this secret. Raises RefusalError (401) if there is none."""
        device = self.store.registry.device_with(secret)
        if device is None:
            raise _unknown_secret(secret, self.store.registry)
        if device.has_left:
            device = self._back(device)
        self.note_seen(device)
        return device

    def member_with(self, secret: str) -> Device | None:
        """The member with this secret; None if there is none. The look-up never waits.

        A device that has left may still come back: see `authenticate`.
        """
        device = self.store.registry.device_with(secret)
        if device is None or device.has_left:
            return None
        self.note_seen(device)
        return device

    def note_seen(self, device: Device) -> None:
        """Record that a request of `device` has come now."""
        activity = self.activity[device.id]  # single assignments need no lock
        activity.seen_at, activity.has_come = self.clock(), True

    def _back(self, device: Device) -> Device:
        """Make a forgotten `device` a member again. Raises RefusalError (401) if it cannot be."""
        again = "join again with a token"
        decision = self.store.operator_log.decisions.get(device.id)
        if decision is not None:
            raise RefusalError(
                "{device} was {decision}.",
                status=401,
                code=NOT_AUTHORISED,
                device=device.id,
                decision=decision.text(),
            )
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
                    "{device} was absent for too long, and another device has taken its place: "
                    "{remedy}.",
                    status=401,
                    code=NOT_AUTHORISED,
                    device=device.id,
                    remedy=again,
                )
            self.enter(device, "is back")
        self.changed.set()
        return self.store.registry.device(device.id)

    def enter(self, device: Device, what: str) -> None:
        """Let `device` take part from the next round on. The caller holds the lock."""
        self.rounds.enrol(device.id)
        self.activity[device.id] = DeviceActivity(self.clock())
        self._log_membership(device, what)

    def leave(self, device: Device) -> None:
        """End the membership of `device`: its secret is void and its place is free."""
        log = self.store.operator_log
        with self.lock:
            self.end_membership(device, also=partial(log.end_pause, device=device.id))
            log.read()
            self.store.release_reports.forget(device.id)
            self.activity[device.id] = DeviceActivity(self.clock(), LEFT)
            self._log_membership(device, "has left")
            for dropped in self.store.registry.drop_left(device.kind):
                del self.activity[dropped]
        self.changed.set()

    def forget_absent(self) -> None:
        """Free the places of the devices that were not seen for `forget_after` seconds.

        A device that comes back later is a member again, if a place is free then.
        """
        limit = self.config.forget_after
        if limit is None:
            return
        with self.lock:
            oldest = self.clock() - limit
            present = self.rounds.devices - self.rounds.paused  # paused devices stay
            for name in [n for n in present if self.activity[n].seen_at < oldest]:
                device = self.store.registry.device(name)
                self.end_membership(device, forgotten=True)
                self.activity[name].state, self.activity[name].note = ABSENT, None
                self._log_membership(device, "was not seen for long and lost its place")

    def end_membership(
        self, device: Device, forgotten: bool = False, also: Also = lambda db: None
    ) -> None:
        """End the membership of `device`. `also` can write more in the same transaction.

        The caller holds the lock.
        """
        self.store.registry.leave(device.id, forgotten, also)
        if not forgotten:
            self.forget_due_secret(device)
            self.store.trusted_keys.forget(device.id)
        self.rounds.leave(device.id)
        self.store.stopped.forget(device.id)
        self.store.incoming.drop(device.id)
        self.note_reopening()

    def _log_membership(self, device: Device, what: str) -> None:
        if not self.minute_log.begins(f"{device.id} {what}", MEMBERSHIP):
            return
        taken, places = len(self.rounds.devices), self.config.places
        of = counted(taken, "place") if places is None else f"{taken} of {counted(places, 'place')}"
        logger.info("%s %s: %s taken.", label(device), what, of)


def _operator_joins(kinds: Sequence[DeviceKind]) -> RefusalError:
    """The refusal of the operator's token at a join. It names the tokens of `kinds`."""
    tokens = " or ".join(f"tokens/{kind.name}.token" for kind in kinds)
    return forbidden(
        "This is an operator's token, which no device may use. Join with a join token: "
        "{tokens} in the coordinator's state folder.",
        code="join.operator-token",
        tokens=tokens,
    )


def _unknown_secret(secret: str, registry: Registry) -> RefusalError:
    """The refusal of an unknown `secret`. If it is a join token, the refusal says for what kind."""
    try:
        kind, places = registry.free_places(secret)
    except RefusalError as refusal:
        if refusal.code != TOKEN_UNKNOWN:
            return refusal
        return RefusalError(
            "No device here has this secret: join again with a token of this coordinator "
            "(`edgetailor-agent join URL --token-file FILE --replace`).",
            status=401,
            code=NOT_AUTHORISED,
        )
    devices = "any number of devices" if places is None else counted(places, "device")
    return RefusalError(
        "This is a join token for {devices} of kind {kind!r}.",
        status=401,
        code=JOIN_TOKEN,
        kind=kind,
        places=places,
        devices=devices,
    )
