"""The logins of operators at the page: they end after hours without use, and with a restart."""

import hmac
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

UNUSED_S = 12 * 3600.0
"""A login ends when it was not used for this many seconds."""
MOST = 100
"""The most logins at a time. If a new login exceeds this, the login that was unused for the longest
time ends."""


@dataclass
class Session:
    """A login.

    Attributes:
        token: The operator's token. It is checked again at every request.
        form_token: A secret that every form of the page sends. So other sites cannot send forms.
        used_at: When the login was last used.
        notice: A text for the next page about the last action, and whether it was refused.
    """

    token: str = field(repr=False)
    used_at: float
    form_token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    notice: tuple[str, bool] | None = None

    def sent(self, form_token: str) -> bool:
        """Whether a form with this token comes from a page of this login."""
        return hmac.compare_digest(form_token.encode(), self.form_token.encode())


class OperatorSessions:
    """The logins, by the random id that a browser keeps in a cookie. May be used by any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._sessions: dict[str, Session] = {}

    def begin(self, token: str) -> str:
        """Begin a login with a valid token. Returns its id."""
        identifier = secrets.token_urlsafe(32)
        with self._lock:
            while len(self._sessions) >= MOST:
                del self._sessions[next(iter(self._sessions))]
            self._sessions[identifier] = Session(token, self._clock())
        return identifier

    def find(self, identifier: str) -> Session | None:
        """The login with this id; None if there is none. The login counts as used now."""
        now = self._clock()
        with self._lock:
            session = self._sessions.pop(identifier, None)
            if session is None or now - session.used_at > UNUSED_S:
                return None
            session.used_at = now
            self._sessions[identifier] = session  # the last of the dictionary was used last
        return session

    def is_open(self, identifier: str) -> bool:
        """Whether there is a login with this id. The question does not count as a use."""
        session = self._sessions.get(identifier)
        return session is not None and self._clock() - session.used_at <= UNUSED_S

    def end(self, identifier: str) -> None:
        """End a login. Repeating it changes nothing."""
        with self._lock:
            self._sessions.pop(identifier, None)
