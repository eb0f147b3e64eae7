"""Errors with which the coordinator refuses a request."""

from typing import Any

from device_agent.formats.protocol.problems import Problem
from profiles.errors import EdgeTailorError


class RefusalError(EdgeTailorError):
    """A refused request.

    Attributes:
        status: The HTTP status of the answer.
    """

    def __init__(self, template: str, *, status: int, code: str, **values: Any) -> None:
        super().__init__(template, code=code, **values)
        self.status = status

    @property
    def problem(self) -> Problem:
        """The body of the answer."""
        return Problem(code=self.code, message=str(self))


def forbidden(template: str, *, code: str, **values: Any) -> RefusalError:
    """A refusal (403): the token or secret is known, but does not allow this request."""
    return RefusalError(template, status=403, code=code, **values)


def conflict(template: str, *, code: str, **values: Any) -> RefusalError:
    """A refusal (409): the request does not fit the current state of the federation."""
    return RefusalError(template, status=409, code=code, **values)


def unusable(template: str, *, code: str, **values: Any) -> RefusalError:
    """A refusal (422): the content of the request cannot be used."""
    return RefusalError(template, status=422, code=code, **values)


def unusable_because(error: EdgeTailorError) -> RefusalError:
    """A refusal (422): the content of the request cannot be used, for the reason in `error`."""
    return RefusalError(error.template, status=422, code=error.code, **error.values)


def cut_off() -> RefusalError:
    """A refusal (408): the request broke off before its end."""
    return RefusalError(
        "The request broke off before its end: send it again.",
        status=408,
        code="client.cut-off",
    )
