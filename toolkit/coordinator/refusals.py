"""What the coordinator answers when it does not do what a device asked."""

from device_agent.formats.protocol import NOT_AUTHORISED, Problem
from profiles.errors import EdgeTailorError


class RefusalError(EdgeTailorError):
    """A request that is refused: HTTP `status`, a `code` for programs, a message for people."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.problem = Problem(code=code, message=message)


def not_authorised(message: str) -> RefusalError:
    """Nobody knows who asks (401)."""
    return RefusalError(401, NOT_AUTHORISED, message)


def forbidden(message: str, code: str = "forbidden") -> RefusalError:
    """It is known who asks, and it may not (403)."""
    return RefusalError(403, code, message)


def conflict(code: str, message: str) -> RefusalError:
    """The request does not fit the present state of the round (409)."""
    return RefusalError(409, code, message)


def unusable(error: EdgeTailorError) -> RefusalError:
    """What was sent cannot be used (422), for the reason that `error` gives."""
    return RefusalError(422, "unusable-update", str(error))


def cut_off() -> RefusalError:
    """The request did not come to its end (408)."""
    return RefusalError(408, "cut-off", "The request did not come to its end: send it again.")
