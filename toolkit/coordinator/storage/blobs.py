"""Files named by their SHA-256. A file is completely on disk before anything refers to it."""

import hashlib
import os
from pathlib import Path

from device_agent.formats.atomic_files import write_file
from device_agent.formats.manifest import FileEntry
from toolkit.coordinator.storage.recoverable import has_hash


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

    def has_size(self, sha256: str, size: int) -> bool:
        """Whether the file with this hash exists and has `size` bytes; its content is not read."""
        try:
            return self.path(sha256).stat().st_size == size
        except OSError:
            return False

    def read(self, sha256: str) -> bytearray | None:
        """The content of the file with this hash; None if it is missing or damaged."""
        try:
            with self.path(sha256).open("rb") as file:
                data = bytearray(os.fstat(file.fileno()).st_size)
                file.readinto(data)
        except OSError:
            return None
        return data if hashlib.sha256(data).hexdigest() == sha256 else None

    def put(self, data: bytes) -> FileEntry:
        """Keep `data`. Repeating the call changes nothing."""
        entry = FileEntry(size=len(data), sha256=hashlib.sha256(data).hexdigest())
        if not self.is_whole(entry.sha256):
            write_file(self.path(entry.sha256), data)
            self._sync()
        return entry

    def adopt(self, path: Path, entry: FileEntry) -> None:
        """Move the file at `path`, which was flushed to disk, to the path for its hash."""
        os.replace(path, self.path(entry.sha256))
        self._sync()

    def names(self) -> list[str]:
        """The hashes of all files, except files that are being written."""
        return [name for name in os.listdir(self.folder) if not name.startswith(".")]

    def _sync(self) -> None:
        """Flush the folder, so that renames survive a power cut."""
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
