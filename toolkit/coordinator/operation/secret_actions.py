"""The operator asks a device for a new secret."""

import logging
from functools import partial
from secrets import token_urlsafe

from device_agent.system.clock import time_text
from toolkit.coordinator.database import secret_log
from toolkit.coordinator.database.device_registry import DAY_S, label
from toolkit.coordinator.database.operator_log import Action
from toolkit.coordinator.database.secret_log import DueSecret
from toolkit.coordinator.operation.device_actions import DeviceActions

logger = logging.getLogger(__name__)


class SecretActions(DeviceActions):
    """Asks devices for new secrets."""

    def rotate_secret(self, identifier: str, days: float, reason: str, who: str) -> None:
        """Ask a device for a new secret.

        The old secret is valid until the device has a new one, and at most for `days`. If the
        device was asked already, nothing changes.

        Raises RefusalError: 404 if there is no such device, 409 if it has left.
        """
        with self.lock:
            device = self.known_device(identifier)
            self.check_member(device, "asked for a new secret")
            if device.id in self.secrets_due:
                return
            asked = DueSecret(token_urlsafe(32), int(self.wall_clock() + days * DAY_S))
            due = {**self.secrets_due, device.id: asked}
            # The decision about the device, such as a pause, stays.
            action = Action("rotate secret", device.id, who, reason, self.decision(device))
            self.store.operator_log.record(action, partial(secret_log.write, due=due))
            self.secrets_due = due
        until = time_text(asked.until)
        logger.info("%s is asked for a new secret until %s.", label(device), until)
