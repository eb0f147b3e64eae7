"""Logging refused credentials: at most one line a minute for each address."""

import logging
from collections.abc import Callable

from profiles.text_formatting import counted

logger = logging.getLogger(__name__)

WINDOW_S = 60.0
MOST_ADDRESSES = 100
"""Addresses that have lines of their own at a time; all others share lines."""
OTHERS = "other addresses"

Later = Callable[[float, Callable[[str], None], str], object]
"""Calls a function with an argument after a number of seconds."""


class CredentialLog:
    """Logs the first refusal of an address at once, and then once a minute how many more came."""

    def __init__(self) -> None:
        self._more: dict[str, int] = {}

    def note(self, address: str, code: str, later: Later) -> None:
        """Note that credentials from `address` were refused for the reason `code`."""
        if address not in self._more and len(self._more) >= MOST_ADDRESSES:
            address = OTHERS
        if address in self._more:
            self._more[address] += 1
            return
        logger.warning("Refused the credentials of a request from %s (%s).", address, code)
        self._open(address, later)

    def _open(self, address: str, later: Later) -> None:
        self._more[address] = 0
        later(WINDOW_S, lambda ended: self._close(ended, later), address)

    def _close(self, address: str, later: Later) -> None:
        more = self._more.pop(address)
        if more:
            times = counted(more, "more request")
            logger.warning("Refused the credentials of %s from %s.", times, address)
            self._open(address, later)
