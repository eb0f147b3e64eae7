"""Downloads and uploads of files. Each attempt continues where the previous attempt ended.

At the end, the SHA-256 of the whole file is checked. If the file is damaged, it is not used but
transferred again.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import urllib3
from urllib3.exceptions import HTTPError

from device_agent.client.client_errors import UnreachableError, reason
from device_agent.client.replies import is_delimited, not_a_coordinator
from device_agent.formats.atomic_files import fingerprint_file, naming
from device_agent.formats.manifest import FileEntry
from device_agent.formats.protocol.transfers import FileOffer, Upload
from profiles.errors import ClientError

PART = ".part-"
"""Beginning of the name of an unfinished download, before the name of the file."""
PIECE_BYTES = 1 << 18
PARTIAL_CONTENT = 206
FILE_STATUSES = (200, PARTIAL_CONTENT)
Send = Callable[..., urllib3.BaseHTTPResponse]
"""`RequestSender._send`."""
Order = Callable[..., None]
"""`RequestSender._order`."""
Ask = Callable[..., Any]
"""`RequestSender._ask`."""


class Download:
    """A download of the file `offer` to `to`.

    The unfinished file stays in the folder of `to`. A later attempt continues it, even if another
    process makes the attempt.

    Attributes:
        done: The bytes of the unfinished file.
    """

    def __init__(
        self, send: Send, url: str, offer: FileOffer, to: Path, alive: Callable[[], None]
    ) -> None:
        self._send, self._url, self._alive = send, url, alive
        self._offer, self._to = offer, to
        self._part = to.with_name(PART + to.name)
        self._restarted = False

    @property
    def done(self) -> int:
        """The bytes of the unfinished file."""
        return self._part.stat().st_size if self._part.exists() else 0

    def attempt(self) -> None:
        """Fetch the missing bytes.

        Raises:
            UnreachableError: The connection broke off, or the file differs from the offer.
        """
        self._to.parent.mkdir(parents=True, exist_ok=True)
        begun = self.done
        if begun < self._offer.size or not begun:
            begun = self._fetch(begun)
        received = fingerprint_file(self._part)
        if received == FileEntry(size=self._offer.size, sha256=self._offer.sha256):
            os.replace(self._part, self._to)
            return
        self._part.unlink()
        if not begun or self._restarted:
            raise self._altered(received)
        self._restarted = True  # the part from an earlier attempt may be damaged
        self.attempt()

    def _fetch(self, begun: int) -> int:
        """Append the bytes from `begun` on. Returns `begun`, or 0 if the whole file was sent."""
        headers = {"Range": f"bytes={begun}-", "If-Range": f'"{self._offer.sha256}"'}
        path = f"/files/{self._offer.sha256}"
        response = self._send("GET", path, headers=headers if begun else {})
        try:
            if response.status != PARTIAL_CONTENT:
                begun = 0
            self._check_kind(response, path, self._offer.size - begun)
            with naming(self._to), self._part.open("ab" if begun else "wb") as file:
                self._receive(response, file, self._offer.size - begun)
                file.flush()
                os.fsync(file.fileno())
        finally:
            response.close()
        return begun

    def _receive(self, response: urllib3.BaseHTTPResponse, file: BinaryIO, missing: int) -> None:
        try:
            # read1 returns what has arrived. If read waited for a whole piece, a cut would lose it.
            while piece := response.read1(PIECE_BYTES):
                file.write(piece)
                missing -= len(piece)
                self._alive()
                # Another program may send without end: stop before the disk is full.
                if missing < 0:
                    return
        except HTTPError as error:
            raise UnreachableError(f"cannot be reached ({reason(error)})", sent=True) from None
        if missing and not is_delimited(response):
            raise UnreachableError("cannot be reached (the connection broke off)", sent=True)

    def _check_kind(self, response: urllib3.BaseHTTPResponse, path: str, missing: int) -> None:
        """Raise UnreachableError if the answer cannot be the `missing` bytes of the file.

        The bytes of earlier attempts are then kept: a network's login page must not replace them.
        """
        kind = response.headers.get("Content-Type", "")
        length = response.headers.get("Content-Length", str(missing))
        other = length != str(missing) and "Content-Encoding" not in response.headers
        if response.status not in FILE_STATUSES or kind.startswith("text/html") or other:
            about = f"HTTP {response.status}, {kind or 'no type'}, {length} bytes"
            raise not_a_coordinator(self._url, f"GET {path} returned {about}")

    def _altered(self, received: FileEntry) -> UnreachableError:
        offer = self._offer
        came = f"{received.size} bytes with SHA-256 {received.sha256[:12]}"
        return UnreachableError(
            f"sends a file that was altered: {offer.name} has {came}",
            sent=True,
            error=ClientError(
                "{file} from {url} was altered: expected {size} bytes with SHA-256 {sha256}, "
                "received {came}. Check whether a proxy between this device and the coordinator "
                "alters files.",
                code="client.altered-file",
                file=offer.name,
                url=self._url,
                size=offer.size,
                sha256=offer.sha256[:12],
                came=came,
            ),
        )


class UploadOfFile:
    """Uploads the file `source`. The last part of the address is the file's SHA-256.

    Attributes:
        done: The bytes that the coordinator had before the last attempt.
    """

    def __init__(
        self, order: Order, ask: Ask, path: str, source: Path, alive: Callable[[], None]
    ) -> None:
        self._order, self._ask, self._source, self._alive = order, ask, source, alive
        self._file = fingerprint_file(source)
        self._path = f"{path}/{self._file.sha256}"
        self.done = 0

    def attempt(self) -> None:
        """Send the bytes that the coordinator does not have yet. Raises UnreachableError."""
        upload: Upload = self._ask("GET", self._path, Upload)
        if upload.complete:
            return
        self.done = upload.received
        # If the coordinator has more bytes than the file, they are of another file: start again.
        begin = upload.received if upload.received <= self._file.size else 0
        with self._source.open("rb") as file:
            file.seek(begin)
            self._order(
                "PUT",
                self._path,
                self._pieces(file),
                size=self._file.size - begin,
                headers={"Upload-Offset": str(begin)},
            )

    def _pieces(self, file: BinaryIO) -> Iterator[bytes]:
        while piece := file.read(PIECE_BYTES):
            self._alive()
            yield piece
