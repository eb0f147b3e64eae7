"""What a coordinator, or some other program in its place, answers: bounded, checked, and every no.

`url` is the coordinator's in all of it.
"""

from dataclasses import replace
from typing import NoReturn

import urllib3
from urllib3.exceptions import HTTPError

from device_agent.client.addresses import one_word
from device_agent.client.client_errors import PreparingError, UnreachableError, reason
from device_agent.formats.protocol import (
    ALREADY_SENT,
    NO_SUCH_FILE,
    NOTHING_FITS,
    OTHER_BUNDLE,
    PREPARING,
    ROUND_CLOSED,
    JoinReply,
    Problem,
)
from profiles.errors import AuthorisationError, ClientError, NothingFitsError, UpdateError
from profiles.json_decoding import MalformedError, decode_json
from profiles.text_formatting import one_line

REPLY_LIMIT = 16 << 20
"""The most bytes that an answer may have, files apart."""
MESSAGE_LENGTH = 1000
"""The most characters that are shown of what a coordinator says."""
WORD_LENGTH = 200
"""The most that an id, a secret or the name of a submodel has."""
RETRY_S = 5.0
LONGEST_RETRY_S = 60.0
"""How often one that prepares is asked: where it does not say, and at the least."""
LATER = frozenset({408, 429, 500, 502, 503, 504})
"""HTTP statuses that waiting may cure."""
ROUND_OVER = frozenset({ROUND_CLOSED, OTHER_BUNDLE, ALREADY_SENT, NO_SUCH_FILE})
"""Codes of refusals that only mean that the rounds went on without this device."""


class RefusedError(UpdateError):
    """The coordinator understood and refused; `code` is its word for programs."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message, code=problem.code)
        if self.code == NOTHING_FITS:
            self.exit_code = NothingFitsError.exit_code

    @property
    def round_over(self) -> bool:
        """Whether asking for work again is all there is to do."""
        return self.code in ROUND_OVER


def read_reply(response: urllib3.BaseHTTPResponse, url: str) -> bytes:
    """The body of an answer.

    Raises UnreachableError if it breaks off, ClientError if it is too long.
    """
    try:
        data = response.read(REPLY_LIMIT + 1)
    except HTTPError as error:
        raise UnreachableError(f"is not there ({reason(error)})", sent=True) from None
    finally:
        response.release_conn()
    if len(data) > REPLY_LIMIT:
        response.close()
        raise not_a_coordinator(url, f"an answer of more than {REPLY_LIMIT} bytes")
    return data


def refuse(response: urllib3.BaseHTTPResponse, url: str, what: str) -> NoReturn:
    """Raise what an answer to the request `what`, other than a success, means.

    UnreachableError, ClientError, AuthorisationError or RefusedError.
    """
    try:
        problem = decode_json(read_reply(response, url), Problem)
    except MalformedError:
        problem = None
    if problem is not None and problem.code == PREPARING:
        raise PreparingError("is still preparing", _retry_s(response))
    if response.status in LATER:
        raise UnreachableError(f"is in trouble (HTTP {response.status})", sent=True)
    if problem is None:
        to = response.get_redirect_location()
        where = f" to {one_line(to, MESSAGE_LENGTH)}" if to else ""
        raise not_a_coordinator(url, f"{what} gave HTTP {response.status}{where}")
    problem = replace(problem, message=one_line(problem.message, MESSAGE_LENGTH))
    if response.status in (401, 403):
        raise AuthorisationError(problem.message, code=problem.code)
    raise RefusedError(problem)


def check_words(reply: JoinReply, url: str) -> JoinReply:
    """`reply`, whose words can be kept, sent and shown. Raises ClientError otherwise."""
    words = (reply.device, reply.secret, reply.submodel)
    if not all(len(word) <= WORD_LENGTH and one_word(word) for word in words):
        raise not_a_coordinator(
            url, "POST /devices gave a device, secret or submodel that is no word"
        )
    return reply


def not_a_coordinator(url: str, what: str) -> ClientError:
    """The error for something else than a coordinator, which did `what`."""
    return ClientError(
        f"{url} answers, but not as an EdgeTailor coordinator does ({what}): check the URL, and "
        "that both sides run the same version."
    )


def _retry_s(response: urllib3.BaseHTTPResponse) -> float:
    """Seconds after which the coordinator wants to be asked again."""
    given = response.headers.get("Retry-After", "")
    return min(max(float(given), 1.0), LONGEST_RETRY_S) if given.isdecimal() else RETRY_S
