"""Finds out which of a device's two secrets the coordinator knows, the present or the next.

This module imports little: `status` and `doctor` use it, and they do not need the device's key.
"""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from device_agent.federation.identity.state_folder import Identity
from profiles.errors import AuthorisationError

T = TypeVar("T")


def with_valid_secret(identity: Identity, ask: Callable[[Identity], T]) -> T:
    """Call `ask` with the present secret of `identity`; if it is unknown, with the next secret.

    A device first sends the hash of its next secret, and then makes this secret the present one. If
    it is killed in between, the coordinator no longer knows the present secret.
    """
    try:
        return ask(identity)
    except AuthorisationError:
        if identity.next_secret is None:
            raise
        return ask(with_next_secret(identity, identity.next_secret))


def with_next_secret(identity: Identity, secret: str) -> Identity:
    """`identity` with its next secret in place of its secret."""
    return msgspec.structs.replace(identity, secret=secret, next_secret=None)
