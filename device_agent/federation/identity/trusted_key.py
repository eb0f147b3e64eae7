"""The coordinator's key that a device trusts. A new key is trusted if the old key signed it."""

import logging
from collections.abc import Callable, Iterable

import msgspec

from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.federation.identity.state_folder import StateFolder
from device_agent.formats.protocol.joining import Invitation
from device_agent.formats.protocol.key_changes import KeyChange
from device_agent.formats.signed_work import (
    FORGED_RELEASE,
    FORGED_WORK,
    check_invitation,
    check_key,
    check_key_change,
    key_fingerprint,
)
from device_agent.system.clock import SYSTEM_CLOCK, Clock, time_text
from profiles.errors import TrustError

log = logging.getLogger(__name__)
NEW_KEY = "The coordinator has a new key, signed with the earlier one: its fingerprint is %s."


class TrustedKey:
    """The coordinator's key in a device's state folder.

    Args:
        folder: The state folder of a device that has joined.
        client: Asks the coordinator for changes of its key.
        clock: The device's clock, which decides whether a change is too old.
    """

    def __init__(
        self, folder: StateFolder, client: CoordinatorClient, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._folder, self._client, self._clock = folder, client, clock
        self._key = folder.member().key

    def check(self, check: Callable[[str], None]) -> None:
        """Check a message of the coordinator: call `check` with the trusted key.

        If another key has signed the message, ask whether the coordinator has a new key, and call
        `check` again with this key. If the device joined before coordinators had keys, nothing is
        checked.

        Raises:
            TrustError: The message or the new key cannot be trusted.
        """
        if self._key is None:
            return
        try:
            check(self._key)
        except TrustError as error:
            if error.code not in (FORGED_WORK, FORGED_RELEASE) or not self._follow(self._key):
                raise
            check(self._key)

    def _follow(self, key: str) -> bool:
        """Trust the key that has replaced `key`. Returns False if no key has replaced it."""
        changes = self._client.key_changes()
        new = new_key(key_fingerprint(key), changes, self._client.url, self._clock)
        if new is None:
            return False
        # One write: a device that is killed here has the old key or the new one.
        self._folder.remember(msgspec.structs.replace(self._folder.member(), key=new))
        self._key = new
        log.info(NEW_KEY, key_fingerprint(new))
        return True


def new_key(
    fingerprint: str, changes: Iterable[KeyChange], url: str, clock: Clock = SYSTEM_CLOCK
) -> str | None:
    """The key that has replaced the key with this `fingerprint`; None if no change replaces it.

    Raises:
        TrustError: A change is not signed with the earlier key, or has expired.
    """
    by_old = {key_fingerprint(change.old): change for change in changes}
    new = None
    # Each change is used only once, so a cycle of changes cannot loop forever.
    while (change := by_old.pop(fingerprint, None)) is not None:
        check_key_change(change, url)
        if clock.now() > change.until:
            raise TrustError(
                "{url} has had a new key since {made}. Devices and join tokens with the earlier "
                "key could change to the new key until {until}; this device's clock says {clock}. "
                "Nothing was changed. Join again with a new token of the operator: "
                "`edgetailor-agent join URL --token-file FILE`.",
                code="trust.late-key",
                url=url,
                made=time_text(change.made),
                until=time_text(change.until),
                clock=str(clock),
            )
        new, fingerprint = change.new, key_fingerprint(change.new)
    return new


def check_named_key(
    client: CoordinatorClient, key: str, fingerprint: str | None, clock: Clock
) -> None:
    """Check `key` of an answer to a join against the `fingerprint` of the token.

    Raises TrustError unless `key` is the key of the token or a later key that has replaced it.
    """
    try:
        check_key(key, fingerprint, client.url)
    except TrustError:
        changes = client.key_changes()
        if fingerprint is None or key != new_key(fingerprint, changes, client.url, clock):
            raise


def check_introduction(
    client: CoordinatorClient, invitation: Invitation, fingerprint: str | None, clock: Clock
) -> None:
    """Raise TrustError unless the coordinator of a token with `fingerprint` signed `invitation`."""
    check_named_key(client, invitation.key, fingerprint, clock)
    check_invitation(invitation, None, client.url)
