"""The secret with which a device makes its requests. The operator can ask for a new secret."""

import logging
from secrets import token_urlsafe

import msgspec

from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.client.replies import RefusedError
from device_agent.federation.identity.device_keys import DeviceKey
from device_agent.federation.identity.state_folder import StateFolder
from device_agent.federation.identity.valid_secret import with_next_secret
from device_agent.formats.protocol.rounds import Work
from profiles.errors import AuthorisationError, InputError

log = logging.getLogger(__name__)


class DeviceSecret:
    """The secret in a device's state folder.

    The device makes a new secret, writes it to its folder, and then sends only the secret's hash.
    So even if the device is killed at any moment, it has the secret that the coordinator knows: the
    present secret or the next secret.

    Args:
        folder: The state folder of a device that has joined.
        client: Makes the device's requests.
    """

    def __init__(self, folder: StateFolder, client: CoordinatorClient) -> None:
        self._folder, self._client = folder, client
        self._told = ""

    def work(self) -> Work:
        """Ask for the next work. If the operator wants a new secret, make the new secret first.

        Raises:
            AuthorisationError: The coordinator knows neither the present nor the next secret.
        """
        work = self._ask()
        if work.new_secret and self._renew(work.new_secret):
            work = self._ask()
        return work

    def _ask(self) -> Work:
        try:
            return self._client.work()
        except AuthorisationError:
            following = self._folder.member().next_secret
            if following is None:
                raise
            # The coordinator has taken it, but the device was killed or got no answer.
            self._client.use_secret(following)
            work = self._client.work()
            self._keep(following)
            return work

    def _renew(self, challenge: str) -> bool:
        """Make a new secret, signed with the device's key, and use it from now on.

        Returns False if the coordinator has not taken it.
        """
        identity = self._folder.member()
        following = identity.next_secret or token_urlsafe(32)
        try:
            key = DeviceKey.from_pem(self._folder.key.read_bytes(), self._folder.key)
            self._folder.remember(msgspec.structs.replace(identity, next_secret=following))
            self._client.renew_secret(key.new_secret(challenge, following))
        except AuthorisationError:
            return True  # the answer to an earlier try was lost: the next request shows it
        except (InputError, OSError, RefusedError) as error:
            if str(error) != self._told:
                log.warning(
                    "The operator asks for a new secret, but this device has not made one: %s",
                    error,
                )
            self._told = str(error)
            return False
        self._client.use_secret(following)
        self._keep(following)
        return True

    def _keep(self, secret: str) -> None:
        self._folder.remember(with_next_secret(self._folder.member(), secret))
        log.info("This device has a new secret, which the operator has asked for.")
