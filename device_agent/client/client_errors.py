"""Why a request did not come through, in words, and whether trying again can help."""

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

OUTSIDE_VALIDITY = (9, 10)
"""OpenSSL's codes for a certificate that is not yet valid, and for one that has expired."""
UNTRUSTED = (18, 19, 20, 21)
"""Those for certificates, or chains of them, that nobody vouches for here."""
PLAIN_HTTP = (
    "WRONG_VERSION_NUMBER",
    "RECORD_LAYER_FAILURE",
    "HTTP_REQUEST",
    "PACKET_LENGTH_TOO_LONG",
)
"""What OpenSSL makes of an answer that is not TLS."""


class UnreachableError(Exception):
    """The coordinator cannot be reached now; `sent` where it may have got the request."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class PreparingError(UnreachableError):
    """It is there and not ready yet: nothing was done; ask again in `retry_s` seconds."""

    def __init__(self, message: str, retry_s: float) -> None:
        super().__init__(message, sent=False)
        self.retry_s = retry_s


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
        return f"the secure connection failed: {tls_reason(_tls_error(error))}"
    if isinstance(error, DecodeError):
        return "its answer cannot be unpacked"
    if any(isinstance(a, IncompleteRead) for a in error.args):
        return "the connection broke off"
    if _not_http(error):
        return "what answers there does not speak HTTP"
    system = _system_error(error)
    if system is not None and system.strerror:
        return system.strerror.lower()
    return "the connection was closed" if system is not None else str(error)


def tls_reason(error: Exception | None) -> str:
    """What is wrong with a secure connection, and what to do about it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in OUTSIDE_VALIDITY:
            now = datetime.datetime.now(datetime.UTC)
            return (
                f"{error.verify_message} by this device's clock, which says "
                f"{now:%Y-%m-%d %H:%M} UTC; set the clock if that is wrong"
            )
        if error.verify_code in UNTRUSTED:
            return (
                f"{error.verify_message}; for a certificate of your own, give the file of its "
                "authority in the environment variable SSL_CERT_FILE"
            )
        return f"{error.verify_message}; the URL needs a name that the certificate is for"
    if isinstance(error, ssl.SSLError) and error.reason in PLAIN_HTTP:
        return "what answers there does not speak TLS; write http:// if that is what it serves"
    if isinstance(error, ssl.SSLEOFError):
        return "the connection was closed in the middle of it"
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    return str(error)


def _tls_error(error: Exception) -> Exception:
    """Python's own error behind urllib3's."""
    return next((found for found in error.args if isinstance(found, ssl.SSLError)), error)


def _not_http(error: Exception) -> bool:
    # A connection that closes early is an HTTPException to http.client, and an OSError as well.
    early = (OSError, IncompleteRead)
    return any(isinstance(a, HTTPException) and not isinstance(a, early) for a in error.args)


def _system_error(error: Exception) -> OSError | None:
    """The operating system's own error behind `error`."""
    behind = (error.__cause__, *error.args)
    return next((found for found in behind if isinstance(found, OSError)), None)
