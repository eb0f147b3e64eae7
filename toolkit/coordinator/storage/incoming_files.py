"""Files that are being received, at most one for each device. Later requests can continue them."""

import hashlib
import os
import re
import secrets
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from device_agent.formats.manifest import FileEntry
from device_agent.formats.protocol.problems import UPLOAD_ALTERED, UPLOAD_OFFSET, UPLOAD_SUPERSEDED
from toolkit.coordinator.refusals import conflict

_PART = re.compile(r"(?P<device>.+)\.(?P<sha256>[0-9a-f]{64})")
"""The names of files that can be continued."""


class IncomingFile:
    """A file that a request sends: at most `limit` bytes, with the expected hash `sha256`.

    Use this class in a `with` block. Received bytes stay on the disk for another request, unless
    they were discarded. If nobody has moved a finished file, it is removed at the end of the block.

    Attributes:
        size: The bytes so far.
    """

    def __init__(self, path: Path, sha256: str, limit: int, before: "IncomingFile | None") -> None:
        self.path, self.sha256, self.limit = path, sha256, limit
        self._lock = threading.Lock()
        self._ended = self._finished = False
        self._file = path.open("ab")
        self.size = path.stat().st_size
        if before is not None and before.size != self.size:
            before = None  # the last bytes did not reach the disk
        self._digest: hashlib._Hash = _digest(path) if before is None else before._digest

    def write(self, piece: bytes) -> bool:
        """Append `piece`. If the file would exceed its limit, write nothing and return False.

        Raises RefusalError (409) if another request has taken over.
        """
        with self._lock:
            self._check_open()
            if self.size + len(piece) > self.limit:
                return False
            self._file.write(piece)
            self._digest.update(piece)
            self.size += len(piece)
            return True

    def finish(self) -> FileEntry:
        """Flush the file to disk under a unique name. Returns its size and its SHA-256.

        Raises RefusalError (409) if another request has taken over, or if the content does not have
        the expected hash. Such content is discarded.
        """
        with self._lock:
            self._check_open()
            self._ended = self._finished = True
            own = self.path.with_name(f".{secrets.token_hex(8)}")
            os.replace(self.path, own)
            self.path = own
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        sha256 = self._digest.hexdigest()
        if sha256 != self.sha256:
            raise conflict(
                "The tensors came with SHA-256 {found} instead of {expected}. They were "
                "discarded: send them again from the start.",
                code=UPLOAD_ALTERED,
                size=self.size,
                found=sha256[:12],
                expected=self.sha256[:12],
            )
        return FileEntry(size=self.size, sha256=sha256)

    def end(self) -> None:
        """Stop the request from writing; the received bytes stay."""
        with self._lock:
            self._ended = True
            with suppress(OSError):  # full disk: the next request continues
                self._file.close()

    def discard(self) -> None:
        """Remove the received bytes, unless another request has taken over."""
        with self._lock:
            if not self._ended:
                self._ended = True
                self.path.unlink(missing_ok=True)

    def _check_open(self) -> None:
        if self._ended:
            raise conflict(
                "Another request of this device sends the tensors now, so this request was ended.",
                code=UPLOAD_SUPERSEDED,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.end()
        if self._finished:
            self.path.unlink(missing_ok=True)


def _digest(path: Path) -> "hashlib._Hash":
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256")


class IncomingFiles:
    """A folder with at most one file for each device. The files survive a restart."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._last: dict[str, IncomingFile] = {}
        self._left: dict[str, Path] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            part = _PART.fullmatch(path.name)
            if part is None:  # a process was stopped between two renames
                path.unlink()
            else:
                self._left[part["device"]] = path

    def received(self, device: str, sha256: str) -> int:
        """The number of received bytes of this file. Ends a request that still sends the file."""
        with self._lock:
            self._end(device)
            return self._size(device, sha256)

    def open(self, device: str, sha256: str, offset: int, limit: int) -> IncomingFile:
        """Open the file of `device` with the hash `sha256` for the bytes of a new request.

        With an `offset` of 0, the request begins the file again. With any other `offset`, the
        request continues the file, and `offset` must be the number of bytes that have come. An
        older request of `device` that is still sending is ended. A file of `device` with another
        hash is removed.

        Raises RefusalError (409) if `offset` is neither 0 nor the number of bytes that have come.
        """
        with self._lock:
            before = self._end(device)
            size = self._size(device, sha256)
            if offset not in (0, size):
                raise conflict(
                    "The coordinator has {received_bytes} bytes of these tensors, but the request "
                    "continues after {offset_bytes}. Ask how many bytes have arrived, and send the "
                    "rest.",
                    code=UPLOAD_OFFSET,
                    received_bytes=size,
                    offset_bytes=offset,
                )
            path = self._folder / f"{device}.{sha256}"
            self._remove(device, keep=path if offset else None)
            same = before is not None and before.path == path and offset > 0
            file = IncomingFile(path, sha256, limit, before if same else None)
            self._last[device], self._left[device] = file, path
            return file

    def drop(self, device: str) -> None:
        """Remove the file of `device`, and end the request that sends it."""
        with self._lock:
            self._end(device)
            self._remove(device)

    def clear(self) -> None:
        """Remove all files, and end all requests."""
        with self._lock:
            for device in list(self._last):
                self._end(device)
            for device in list(self._left):
                self._remove(device)

    def _end(self, device: str) -> IncomingFile | None:
        file = self._last.pop(device, None)
        if file is not None:
            file.end()
        return file

    def _size(self, device: str, sha256: str) -> int:
        try:
            return (self._folder / f"{device}.{sha256}").stat().st_size
        except FileNotFoundError:
            return 0

    def _remove(self, device: str, keep: Path | None = None) -> None:
        path = self._left.get(device)
        if path is not None and path != keep:
            path.unlink(missing_ok=True)
            del self._left[device]
