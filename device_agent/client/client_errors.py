"""Explains to people why a request failed, and tells whether repeating it can help."""

import datetime
import ssl
from http.client import HTTPException, IncompleteRead

from urllib3.exceptions import (
    ConnectTimeoutError,
    DecodeError,
    LocationValueError,
    NameResolutionError,
    NewConnectionError,
    ReadTimeoutError,
    SSLError,
)

from profiles.errors import ClientError

OUTSIDE_VALIDITY = (9, 10)
"""OpenSSL's verify codes: the certificate is not valid yet, or has expired."""
UNTRUSTED = (18, 19, 20, 21)
"""OpenSSL's verify codes: no authority that this device trusts has signed the certificate."""
PLAIN_HTTP = (
    "WRONG_VERSION_NUMBER",
    "RECORD_LAYER_FAILURE",
    "HTTP_REQUEST",
    "PACKET_LENGTH_TOO_LONG",
)
"""OpenSSL's reasons when the answer is not TLS."""


CUT = (ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""Errors of a connection that was closed during the handshake. OpenSSL's version decides which of
them is raised."""


class UnreachableError(Exception):
    """The coordinator did not answer: it cannot be reached, or another program answered.

    Attributes:
        sent: Whether the coordinator may have received the request.
        error: The error to raise after the last attempt; None if nothing answered.
        lasting: Whether the problem will probably last. If so, a command that a user watches ends
            without waiting.
        clock: Whether the cause may be this device's clock.
    """

    def __init__(
        self,
        message: str,
        *,
        sent: bool,
        error: ClientError | None = None,
        lasting: bool = False,
        clock: bool = False,
    ) -> None:
        super().__init__(message)
        self.sent, self.error, self.lasting, self.clock = sent, error, lasting, clock


class PreparingError(UnreachableError):
    """The coordinator is still starting and has not handled the request.

    Attributes:
        retry_s: Seconds until the next request.
    """

    def __init__(self, message: str, retry_s: float) -> None:
        super().__init__(message, sent=False)
        self.retry_s = retry_s


def is_lasting(error: Exception) -> bool:
    """Whether the problem will probably last, so that waiting seldom helps.

    Examples are a wrong URL, a failure of TLS, and an answer from another program.
    """
    if isinstance(error, SSLError):
        return not isinstance(_tls_error(error), CUT)
    return isinstance(error, LocationValueError) or _not_http(error)


def is_outside_validity(error: Exception) -> bool:
    """Whether, by this device's clock, the certificate is not valid yet or has expired."""
    return getattr(_tls_error(error), "verify_code", None) in OUTSIDE_VALIDITY


def nothing_was_sent(error: Exception) -> bool:
    """Whether nothing was sent, because no connection was made."""
    return isinstance(error, NewConnectionError | ConnectTimeoutError)


def reason(error: Exception) -> str:
    """Describe the cause of `error` in a few words."""
    if isinstance(error, NameResolutionError):
        return "its name cannot be resolved"
    if isinstance(error, ConnectTimeoutError) and not isinstance(error, NewConnectionError):
        return "no answer to the attempt to connect"
    if isinstance(error, ReadTimeoutError):
        return "connected, but no answer came"
    if isinstance(error, SSLError):
        return f"the secure connection failed: {tls_reason(_tls_error(error))}"
    if isinstance(error, DecodeError):
        return "its answer cannot be decompressed"
    # urllib3 wraps errors of http.client: the cause is among the arguments.
    if any(isinstance(a, IncompleteRead) for a in error.args):
        return "the connection broke off"
    if _not_http(error):
        return "the answer is not HTTP"
    system = _system_error(error)
    if system is not None and system.strerror:
        return system.strerror.lower()
    return "the connection was closed" if system is not None else str(error)


def tls_reason(error: Exception | None) -> str:
    """Describe why a TLS connection failed, and the remedy after a semicolon."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in OUTSIDE_VALIDITY:
            now = datetime.datetime.now(datetime.UTC)
            return (
                f"{error.verify_message} according to this device's clock, "
                f"{now:%Y-%m-%d %H:%M} UTC; set the clock if it is wrong"
            )
        if error.verify_code in UNTRUSTED:
            return (
                f"{error.verify_message}; if `edgetailor serve` prints --certificate, join with "
                "it; if you have your own authority, set SSL_CERT_FILE to the file of its "
                "certificate"
            )
        return f"{error.verify_message}; in the URL, use a host name that the certificate is for"
    if isinstance(error, ssl.SSLError) and error.reason in PLAIN_HTTP:
        return "the answer is not TLS; write http:// if the server does not use TLS"
    if isinstance(error, CUT):
        return "the connection was closed during the handshake"
    if "Fingerprints did not match" in str(error):  # urllib3 has no class for it
        return (
            "the coordinator's certificate is not the one that --certificate named; if the "
            "operator has a new certificate, join again with its SHA-256"
        )
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    return str(error)


def _tls_error(error: Exception) -> Exception:
    """The error of Python's ssl module that urllib3 wrapped."""
    return next((cause for cause in error.args if isinstance(cause, ssl.SSLError)), error)


def _not_http(error: Exception) -> bool:
    # For a connection that closes early, the HTTPException of http.client is also an OSError.
    early = (OSError, IncompleteRead)
    return any(isinstance(a, HTTPException) and not isinstance(a, early) for a in error.args)


def _system_error(error: Exception) -> OSError | None:
    """The operating system's error that `error` wraps."""
    behind = (error.__cause__, *error.args)
    return next((cause for cause in behind if isinstance(cause, OSError)), None)
