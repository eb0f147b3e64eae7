"""Finds out which of a device's two secrets the coordinator knows, the present or the next.

This module imports little, because `status` and `doctor` use it without the device's key.
"""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from device_agent.federation.identity.state_folder import Identity
from profiles.errors import AuthorisationError

T = TypeVar("T")


def with_valid_secret(identity: Identity, ask: Callable[[Identity], T]) -> T:
    """Call `ask` with the present secret of `identity`. If it is unknown, use the next secret.

    A device first sends the hash of its next secret. Then it makes this secret the present secret.
    If the device is killed between the two steps, the coordinator no longer knows the present
    secret.
    """
    try:
        return ask(identity)
    except AuthorisationError:
        if identity.next_secret is None:
            raise
        return ask(with_next_secret(identity, identity.next_secret))


def with_next_secret(identity: Identity, secret: str) -> Identity:
    """Return `identity` with its next secret as the present secret."""
    return msgspec.structs.replace(identity, secret=secret, next_secret=None)
