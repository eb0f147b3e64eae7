"""Why a request did not come through, in words, and whether trying again can help."""

from urllib3.exceptions import (
    ConnectTimeoutError,
    IncompleteRead,
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
    return isinstance(error, SSLError | LocationValueError)


def unanswered(error: Exception) -> bool:
    """Whether no connection came about, so that nothing can have been sent."""
    return isinstance(error, NewConnectionError | ConnectTimeoutError)


def reason(error: Exception) -> str:
    """A few words on why `error` happened."""
    if isinstance(error, NameResolutionError):
        return "its name is not known here"
    if isinstance(error, ConnectTimeoutError):
        return "no answer to the connection"
    if isinstance(error, ReadTimeoutError):
        return "connected, but no answer came"
    if isinstance(error, SSLError):
        return f"the secure connection failed: {error}"
    if isinstance(error, IncompleteRead):
        return "the connection broke off"
    system = _system_error(error)
    if system is not None and system.strerror:
        return system.strerror.lower()
    return "the connection was closed" if system is not None else str(error)


def _system_error(error: BaseException | None) -> OSError | None:
    """The operating system's own error behind `error`."""
    while error is not None:
        if isinstance(error, OSError):
            return error
        error = error.__cause__ or error.__context__
    return None
