"""The operator's actions on devices: pause, resume, remove, ban, let in again.

Each action and its entry in the audit log are one transaction. Repeating an action changes nothing,
and leaves no second entry.
"""

import logging
from collections.abc import Callable
from functools import partial

from device_agent.formats.manifest import MANIFEST
from device_agent.formats.protocol.fleet import LEFT, STOPPED
from toolkit.coordinator.database.device_registry import Device, label
from toolkit.coordinator.database.operator_log import (
    BANNED,
    PAUSED,
    REMOVED,
    Action,
    Decision,
    Outcome,
)
from toolkit.coordinator.devices.device_activity import DeviceActivity
from toolkit.coordinator.operation.messages import Action as ActionName
from toolkit.coordinator.refusals import conflict
from toolkit.coordinator.requests.device_troubles import DeviceTroubles
from toolkit.coordinator.requests.membership import Membership

logger = logging.getLogger(__name__)


class DeviceActions(Membership, DeviceTroubles):
    """Acts on devices for the operator."""

    def act(self, name: ActionName, identifier: str, reason: str, who: str) -> None:
        """Carry out the action `name` of the operator `who` on a device, for this reason.

        Raises:
            RefusalError: 404 if there is no such device; 409 if it cannot be paused or resumed
                because it has left.
        """
        actions: dict[ActionName, Callable[[Device, str, str], None]] = {
            "pause": self._pause,
            "resume": self._end_pause,
            "remove": self._remove,
            "ban": self._ban,
            "let-in": self._let_in,
        }
        with self.lock:
            actions[name](self.known_device(identifier), reason, who)
        self.changed.set()

    def decision(self, device: Device) -> Decision | None:
        """The operator's decision about `device`, or None."""
        return self.store.operator_log.decisions.get(device.id)

    def _pause(self, device: Device, reason: str, who: str) -> None:
        """Give `device` no work until it is resumed; its update of the open round counts."""
        self.check_member(device, "paused")
        if device.id in self.rounds.paused:
            return
        self._record("pause", device, reason, who, PAUSED)
        self.rounds.pause(device.id)
        self.note_reopening()
        activity, note = self.activity[device.id], self.store.operator_log.decisions[device.id]
        activity.state, activity.note = PAUSED, note.text()
        self._log(device, f"is {note.text()}")

    def _end_pause(self, device: Device, reason: str, who: str) -> None:
        """End a pause: `device` also takes part in the open round."""
        self.check_member(device, "resumed")
        if device.id not in self.rounds.paused:
            return
        self._record("resume", device, reason, who, None)
        bundle = self.bundles.get(self.submodel(device), {})
        failed = device.id in self.store.open_round.failures(self.rounds.round)
        self.rounds.unpause(device.id, bundle[MANIFEST].sha256 if bundle and not failed else None)
        activity, stopped = self.activity[device.id], self.store.stopped.reasons()
        activity.state, activity.note = "waiting", None
        if device.id in stopped:
            activity.state, activity.note = STOPPED, stopped[device.id]
        self._log(device, "is no longer paused")

    def _remove(self, device: Device, reason: str, who: str) -> None:
        """End the membership of `device`: its secret is void, and its place is free."""
        if not device.has_left or device.forgotten:
            self._exclude(device, "remove", reason, who, REMOVED)

    def _ban(self, device: Device, reason: str, who: str) -> None:
        """Remove `device`, and refuse its key.

        A device that joined again with this key is banned, too.
        """
        same = self.store.registry.member_with_key(device.public_key)
        for banned in (device, same):
            decision = None if banned is None else self.decision(banned)
            if banned is not None and (decision is None or decision.outcome != BANNED):
                self._exclude(banned, "ban", reason, who, BANNED)

    def _exclude(self, device: Device, verb: str, reason: str, who: str, outcome: Outcome) -> None:
        action = self._action(verb, device, reason, who, outcome)
        write = partial(self.store.operator_log.write, action=action)
        self.end_membership(device, also=write)
        self.store.operator_log.read()
        self.store.release_reports.forget(device.id)
        note = self.store.operator_log.decisions[device.id].text()
        self.activity[device.id] = DeviceActivity(self.clock(), LEFT, note=note)
        self._log(device, f"was {note}")
        if outcome == BANNED:
            self.notify("device-banned", f"{label(device)} was {note}", device=device.id)

    def _let_in(self, device: Device, reason: str, who: str) -> None:
        """Lift the decision about `device`, and every ban of its key.

        A device that was removed is a member again if a place is free. Otherwise it may join again
        with a token.
        """
        log, decision = self.store.operator_log, self.decision(device)
        if decision is None:
            return
        if decision.outcome == PAUSED:
            self._end_pause(device, reason, who)
            return
        for banned in log.banned(device.public_key).keys() - {device.id}:
            other = self.store.registry.device(banned)
            self._record("let-in", other, reason, who, None)
            self.activity[banned].note = None
        action = self._action("let-in", device, reason, who, None)
        back = decision.member and self.store.registry.come_back(
            device.id, partial(log.write, action=action)
        )
        if back:
            log.read()
            self.enter(self.store.registry.device(device.id), "is let in again")
        else:
            log.record(action)
            self.activity[device.id].note = None
            self._log(device, "may join again")

    def _record(
        self, name: str, device: Device, reason: str, who: str, outcome: Outcome | None
    ) -> None:
        self.store.operator_log.record(self._action(name, device, reason, who, outcome))

    def _action(
        self, name: str, device: Device, reason: str, who: str, outcome: Outcome | None
    ) -> Action:
        before = self.decision(device)
        member = not device.has_left or (before is not None and before.member)
        then = None if outcome is None else Decision(outcome, reason, device.public_key, member)
        return Action(name, device.id, who, reason, then)

    def check_member(self, device: Device, what: str) -> None:
        """Raise RefusalError (409) if `device` has left. `what` names the action, like "paused"."""
        if device.has_left:
            raise conflict(
                "{device} has left this federation, so it cannot be {what}.",
                code="operator.not-a-member",
                device=device.id,
                what=what,
            )

    def _log(self, device: Device, what: str) -> None:
        logger.info("%s %s", label(device), what)
