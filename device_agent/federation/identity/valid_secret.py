"""Which secret of a device the coordinator knows.

This module imports little: `status` and `doctor` need it, and neither needs the device's key.
"""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from device_agent.federation.identity.state_folder import Identity
from profiles.errors import AuthorisationError

T = TypeVar("T")


def with_valid_secret(identity: Identity, ask: Callable[[Identity], T]) -> T:
    """Call `ask` with `identity`, and again with its next secret if its secret is unknown.

    So it is after a device was killed between sending a new secret and keeping it.
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
