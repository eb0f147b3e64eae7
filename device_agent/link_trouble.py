"""Why a request did not come through, in words, and whether trying again can help."""

from http.client import HTTPException, IncompleteRead

from urllib3.exceptions import (
    ConnectTimeoutError,
    LocationValueError,
    NameResolutionError,
    NewConnectionError,
    ReadTimeoutError,
    SSLError,
)


class UnreachableError(Exception):
    """The coordinator cannot be reached now; `sent` where it may have got the request."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


def permanent(error: Exception) -> bool:
    """Whether the same request would fail again however long one waits."""
    return isinstance(error, SSLError | LocationValueError) or _not_http(error)


def unanswered(error: Exception) -> bool:
    """Whether no connection came about, so that nothing can have been sent."""
    return isinstance(error, NewConnectionError | ConnectTimeoutError)


def reason(error: Exception) -> str:
    """A few words on why `error` happened."""
    if isinstance(error, NameResolutionError):
        return "its name is not known here"
    if isinstance(error, ConnectTimeoutError) and not isinstance(error, NewConnectionError):
        return "no answer to the connection"
    if isinstance(error, ReadTimeoutError):
        return "connected, but no answer came"
    if isinstance(error, SSLError):
        return f"the secure connection failed: {error}"
    if any(isinstance(a, IncompleteRead) for a in error.args):
        return "the connection broke off"
    if _not_http(error):
        return "what answers there does not speak HTTP"
    system = _system_error(error)
    if system is not None and system.strerror:
        return system.strerror.lower()
    return "the connection was closed" if system is not None else str(error)


def _not_http(error: Exception) -> bool:
    # A connection that closes early is an HTTPException to http.client, and an OSError as well.
    early = (OSError, IncompleteRead)
    return any(isinstance(a, HTTPException) and not isinstance(a, early) for a in error.args)


def _system_error(error: Exception) -> OSError | None:
    """The operating system's own error behind `error`."""
    behind = (error.__cause__, *error.args)
    return next((found for found in behind if isinstance(found, OSError)), None)
