"""HTTP connections that raise an error if an answer breaks off within its headers.

If an answer breaks off within its headers, Python's HTTP client reads it as an answer with complete
headers. Without this check, an answer that a proxy has cut would look like a complete answer of
another program.
"""

import warnings
from http.client import HTTPResponse, RemoteDisconnected
from io import BufferedReader
from typing import BinaryIO, cast

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import SystemTimeWarning

# urllib3 would print on every connection that the clock is wrong. The agent says it once.
warnings.simplefilter("ignore", SystemTimeWarning)


class _WholeLines:
    """Reads lines of `file`. Raises RemoteDisconnected if the file ends before a line's end."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.close = file.close

    def readline(self, limit: int) -> bytes:
        line = self._file.readline(limit)
        # A line that is too long is also returned without its end; the caller refuses it.
        if not line.endswith(b"\n") and len(line) < limit:
            raise RemoteDisconnected("the answer was cut within its headers")
        return line


class _Response(HTTPResponse):
    def begin(self) -> None:
        """Read the status and all headers. Raises RemoteDisconnected if they are cut."""
        file = self.fp
        self.fp = cast(BufferedReader, _WholeLines(file))
        try:
            super().begin()
        finally:
            if self.fp is not None:  # closed after a line that is not a status
                self.fp = file


class _Connection(HTTPConnection):
    response_class = _Response


class _SecureConnection(HTTPSConnection):
    response_class = _Response


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Connection


class _SecurePool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _SecureConnection


def connections(headers: dict[str, str], certificate: str | None = None) -> urllib3.PoolManager:
    """Return a pool of connections for requests with `headers`. The pool does not repeat requests.

    `certificate` is the SHA-256 of the server's certificate. If it is given, only this certificate
    is accepted, even if no authority has signed it.
    """
    pool = urllib3.PoolManager(
        headers=headers,
        retries=False,
        cert_reqs="CERT_NONE" if certificate else None,
        assert_fingerprint=certificate,
    )
    pool.pool_classes_by_scheme = {"http": _Pool, "https": _SecurePool}
    return pool
