"""Reading and checking the coordinator's answers, including refusals.

An answer may come from another program, so its size is limited and its content is checked. In all
functions, `url` is the URL of the coordinator.
"""

import re
from dataclasses import replace
from typing import NoReturn

import urllib3
from urllib3.exceptions import HTTPError

from device_agent.client.addresses import one_word
from device_agent.client.client_errors import PreparingError, UnreachableError, reason
from device_agent.client.retries import RETRIED_STATUSES
from device_agent.formats.protocol.joining import JoinReply
from device_agent.formats.protocol.problems import (
    ALREADY_SENT,
    NO_SUCH_FILE,
    NOTHING_FITS,
    OTHER_BUNDLE,
    PREPARING,
    ROUND_CLOSED,
    UPLOAD_ALTERED,
    UPLOAD_OFFSET,
    UPLOAD_SUPERSEDED,
    Problem,
)
from profiles.errors import AuthorisationError, ClientError, NothingFitsError, UpdateError
from profiles.json_decoding import MalformedError, decode_json
from profiles.text_formatting import one_line

REPLY_LIMIT = 16 << 20
"""Largest size of an answer in bytes, except for files."""
MESSAGE_LENGTH = 1000
"""The most characters of a coordinator's message that are shown."""
WORD_LENGTH = 200
"""The most characters in an id, a secret or the name of a submodel."""
RETRY_S = 5.0
LONGEST_RETRY_S = 60.0
"""Seconds between requests to a coordinator that is starting: the default and the longest."""
ROUND_OVER = frozenset({ROUND_CLOSED, OTHER_BUNDLE, ALREADY_SENT, NO_SUCH_FILE})
"""Codes of refusals that mean that the rounds continued without this device."""
SEND_AGAIN = frozenset({UPLOAD_OFFSET, UPLOAD_SUPERSEDED, UPLOAD_ALTERED})
"""Codes of refused uploads for which another attempt can succeed."""
CODE = re.compile(r"[a-z]+(-[a-z]+)*\.[a-z0-9]+(-[a-z0-9]+)*")
"""The form of a code, for example `client.not-authorised`."""


class RefusedError(UpdateError):
    """The coordinator understood the request and refused it. `code` is the coordinator's code."""

    def __init__(self, problem: Problem) -> None:
        super().__init__("{answer}", code=problem.code, answer=problem.message)
        if self.code == NOTHING_FITS:
            self.exit_code = NothingFitsError.exit_code

    @property
    def round_over(self) -> bool:
        """Whether the round continued without this device. If so, the device asks for new work."""
        return self.code in ROUND_OVER


def read_reply(response: urllib3.BaseHTTPResponse, url: str) -> bytes:
    """Read the body of an answer.

    Raises:
        UnreachableError: The connection broke off, or the body is too long.
    """
    try:
        # One byte more than allowed, to notice an answer that is longer.
        data = response.read(REPLY_LIMIT + 1)
    except HTTPError as error:
        raise UnreachableError(f"cannot be reached ({reason(error)})", sent=True) from None
    finally:
        response.release_conn()
    if len(data) > REPLY_LIMIT:
        response.close()
        raise not_a_coordinator(url, f"an answer of more than {REPLY_LIMIT} bytes")
    return data


def is_delimited(response: urllib3.BaseHTTPResponse) -> bool:
    """Whether the answer states the end of its body. If not, the body ends with the connection."""
    return response.length_remaining is not None or response.chunked


def check_not_cut(response: urllib3.BaseHTTPResponse, data: bytes) -> None:
    """Raise an error if an answer is invalid JSON and the connection has probably broken off.

    Args:
        response: The answer.
        data: Its body, which is not valid JSON.

    Raises:
        UnreachableError: The body is empty or begins like JSON, and the answer does not state where
            its body ends.
    """
    if data[:1] in (b"", b"{") and not is_delimited(response):
        raise UnreachableError("cannot be reached (the connection broke off)", sent=True)


def raise_refusal(response: urllib3.BaseHTTPResponse, url: str, request: str) -> NoReturn:
    """Raise the error for an answer that is not a success.

    Args:
        response: The answer.
        url: The coordinator's URL.
        request: Method and path of the request.

    Raises:
        UnreachableError: The coordinator has a temporary problem or is starting, or the answer does
            not come from a coordinator.
        AuthorisationError: The coordinator does not accept the token or the secret.
        RefusedError: The coordinator refused the request.
    """
    data = read_reply(response, url)
    problem = own_problem(response, data)
    if problem is not None and problem.code == PREPARING:
        raise PreparingError("is still preparing", _retry_s(response))
    if problem is not None and problem.code in SEND_AGAIN:
        raise UnreachableError(f"did not take this part of the upload ({problem.code})", sent=True)
    if response.status in RETRIED_STATUSES:
        raise UnreachableError(f"has a problem (HTTP {response.status})", sent=True)
    if problem is None:
        to = response.get_redirect_location()
        if not to:
            check_not_cut(response, data)
        target = f" to {one_line(to, MESSAGE_LENGTH)}" if to else ""
        raise not_a_coordinator(url, f"{request} returned HTTP {response.status}{target}")
    # The message goes to a terminal: control characters could move its cursor.
    problem = replace(problem, message=one_line(problem.message, MESSAGE_LENGTH))
    if response.status in (401, 403):
        raise AuthorisationError("{answer}", code=problem.code, answer=problem.message)
    raise RefusedError(problem)


def own_problem(response: urllib3.BaseHTTPResponse, data: bytes) -> Problem | None:
    """Decode the Problem in the body `data`. Returns None if the answer is not from a coordinator.

    Login pages of networks, proxies and other services use the same HTTP statuses.
    """
    if not response.headers.get("Content-Type", "").startswith("application/json"):
        return None
    try:
        problem = decode_json(data, Problem)
    except MalformedError:
        return None
    return problem if CODE.fullmatch(problem.code) else None


def check_words(reply: JoinReply, url: str) -> JoinReply:
    """Check that the words in `reply` can be stored, sent and shown.

    Returns:
        `reply`.

    Raises:
        UnreachableError: A text in `reply` is too long or is not a single word.
    """
    words = (reply.device, reply.secret, reply.submodel, *reply.arrays)
    if not all(len(word) <= WORD_LENGTH and one_word(word) for word in words):
        raise not_a_coordinator(
            url,
            "POST /devices returned a device, secret, submodel or array name that is not one short "
            "word",
        )
    return reply


def not_a_coordinator(url: str, answer: str) -> UnreachableError:
    """The error for an answer that does not come from a coordinator.

    Args:
        url: The address that answered.
        answer: The request and its answer.
    """
    # Even if another program answered, the coordinator may have received the request.
    return UnreachableError(
        f"does not answer: another program answers ({answer})",
        sent=True,
        error=ClientError(
            "{url} answers, but not like an EdgeTailor coordinator ({found}). Check the URL, and "
            "that both sides run the same version. A network with a login page also answers like "
            "this.",
            code="client.not-a-coordinator",
            url=url,
            found=answer,
        ),
    )


def _retry_s(response: urllib3.BaseHTTPResponse) -> float:
    """Seconds until the next request, from the header Retry-After."""
    # The header may also hold a date. The coordinator sends seconds only.
    given = response.headers.get("Retry-After", "")
    return min(max(float(given), 1.0), LONGEST_RETRY_S) if given.isdecimal() else RETRY_S
