"""Files named by their SHA-256. A file is completely on disk before anything refers to it."""

import hashlib
import os
import secrets
from collections.abc import Set
from pathlib import Path
from types import TracebackType
from typing import Self

from device_agent.formats.atomic_files import write_file
from device_agent.formats.manifest import FileEntry
from toolkit.coordinator.storage.recoverable import has_hash

_PART = ".part-"


class IncomingFile:
    """A file being received: at most `limit` bytes, counted and hashed as they come.

    Use it in a `with` block. The file is removed at its end unless `Blobs.adopt` has taken it.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.limit = limit
        self.size = 0
        self.path = folder / f"{_PART}{secrets.token_hex(8)}"
        self._digest = hashlib.sha256()
        self._file = self.path.open("wb")

    def write(self, piece: bytes) -> bool:
        """Append `piece`. Returns False and writes nothing if that would exceed the limit."""
        if self.size + len(piece) > self.limit:
            return False
        self.size += len(piece)
        self._digest.update(piece)
        self._file.write(piece)
        return True

    def finish(self) -> FileEntry:
        """Flush the file to disk; returns its size in bytes and its SHA-256."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return FileEntry(size=self.size, sha256=self._digest.hexdigest())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._file.close()
        self.path.unlink(missing_ok=True)


class Blobs:
    """A folder of files named by their SHA-256. It has no lock: the store provides one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".*"):  # from a process that was stopped while writing
            left.unlink()

    def path(self, sha256: str) -> Path:
        """The path of the file with this hash."""
        return self.folder / sha256

    def is_whole(self, sha256: str) -> bool:
        """Whether the file with this hash exists and is undamaged."""
        return has_hash(self.path(sha256), sha256)

    def put(self, data: bytes) -> FileEntry:
        """Keep `data`. Repeating it changes nothing."""
        entry = FileEntry(size=len(data), sha256=hashlib.sha256(data).hexdigest())
        if not self.is_whole(entry.sha256):
            write_file(self.path(entry.sha256), data)
            self._sync()
        return entry

    def adopt(self, received: IncomingFile) -> FileEntry:
        """Keep a received file."""
        entry = received.finish()
        os.replace(received.path, self.path(entry.sha256))
        self._sync()
        return entry

    def keep_only(self, wanted: Set[str]) -> None:
        """Remove every file whose hash is not in `wanted`, except files being received."""
        for path in self.folder.iterdir():
            if path.name not in wanted and not path.name.startswith("."):
                path.unlink()

    def _sync(self) -> None:
        """Flush the folder, so that renames survive a power cut."""
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
