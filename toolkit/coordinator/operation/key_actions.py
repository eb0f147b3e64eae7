"""The operator replaces the coordinator's key. The old key signs the new key for the devices."""

import logging
from functools import partial

from device_agent.formats.protocol.fleet import KeyFollowed
from device_agent.formats.protocol.key_changes import KeyChanges
from device_agent.formats.signed_work import key_fingerprint
from device_agent.system.clock import time_text
from toolkit.coordinator.database import key_log
from toolkit.coordinator.database.device_registry import DAY_S
from toolkit.coordinator.database.operator_log import Action
from toolkit.coordinator.devices import key_files
from toolkit.coordinator.devices.coordinator_key import CoordinatorKey
from toolkit.coordinator.federation_state import FederationState
from toolkit.coordinator.operation.messages import EarlierKey, KeyState
from toolkit.coordinator.refusals import conflict

logger = logging.getLogger(__name__)


class KeyActions(FederationState):
    """Manages the key that signs the work of devices."""

    def signed_key_changes(self) -> KeyChanges:
        """All changes of the coordinator's key, for devices that know an earlier one."""
        return KeyChanges(changes=self.key_changes)

    def key_state(self) -> KeyState:
        """The fingerprint of the coordinator's key, and the earlier keys."""
        with self.lock:
            members = self.rounds.devices
            earlier = [
                EarlierKey(fingerprint=key_fingerprint(change.old), until=change.until)
                for change in self.key_changes
            ]
            return KeyState(
                fingerprint=self.key.fingerprint,
                earlier=earlier,
                followed=sum(self.follows_key(device) is not False for device in members),
                devices=len(members),
            )

    def new_key(self) -> KeyFollowed | None:
        """How many devices follow the new key; None if there is no new key, or if all follow it."""
        if not self.key_changes:
            return None
        state = self.key_state()
        if state.followed == state.devices:
            return None
        until = state.earlier[-1].until
        return KeyFollowed(followed=state.followed, devices=state.devices, until=until)

    def rotate_key(self, fingerprint: str, days: float, reason: str, who: str) -> KeyState:
        """Replace the coordinator's key, if it has this `fingerprint`, by a new one.

        For `days`, devices and join tokens with the old key can change to the new key. If the last
        rotation already replaced the key with this fingerprint, nothing changes.

        Raises RefusalError (409) if the coordinator has another key.
        """
        with self.lock:
            last = self.key_changes[-1:]
            if [key_fingerprint(change.old) for change in last] == [fingerprint]:
                return self.key_state()
            if fingerprint != self.key.fingerprint:
                raise conflict(
                    "The coordinator's key has the fingerprint {fingerprint}, not {given}: "
                    "somebody has replaced the key. Nothing was changed.",
                    code="operator.other-key",
                    fingerprint=self.key.fingerprint,
                    given=fingerprint[:64],
                )
            state, key, now = self.store.folder, CoordinatorKey(), self.wall_clock()
            change = self.key.hands_over(key, int(now), int(now + days * DAY_S))
            changes = [*self.key_changes, change]
            key_files.prepare(state, key)
            action = Action("rotate key", f"key {key.fingerprint}", who, reason)
            self.store.operator_log.record(action, partial(key_log.write, changes=changes))
            # From here on the database names the new key: a restart completes the rest.
            self.key, self.key_changes = key, changes
            key_files.install(state, key)
            key_files.renew_tokens(state, [k.name for k in self.config.devices], key.fingerprint)
        until = time_text(change.until)
        logger.info("%s replaces the coordinator's key. Devices follow until %s.", who, until)
        self.changed.set()
        return self.key_state()
