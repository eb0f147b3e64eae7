"""What a device has done in its rounds, on its disk: rounds.log in the state folder.

The system's journal loses the lines before a power cut. These are written through to the disk, and
the file stays small.
"""

import datetime
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from device_agent.formats.atomic_files import write_file
from profiles.errors import EdgeTailorError
from profiles.text_formatting import one_line

MOST_BYTES = 64_000
"""A file that grows beyond this is cut to the newer half of its lines."""
LONGEST_LINE = 500
"""Characters of a line that are kept."""
DETAILED = "device_agent.training"
"""Batches and epochs, which would wear out an SD card. Only warnings are kept of this package."""

NOT_KEPT = {"kept": False}
"""`extra` of a line that is not kept: a download of five files would hide what came before."""


@contextmanager
def kept_log(path: Path) -> Iterator[None]:
    """Write this thread's log lines to `path`, too, while the block runs, and how it ends."""
    handler, logger = _Handler(path), logging.getLogger("device_agent")
    logger.addHandler(handler)
    try:
        handler.note("Started.")
        yield
    except EdgeTailorError as error:
        handler.note(f"Ended: {error}")
        raise
    except (SystemExit, KeyboardInterrupt):
        handler.note("Stopped.")
        raise
    except BaseException as error:
        handler.note(f"Ended by {type(error).__name__}: {error}")
        raise
    else:
        handler.note("Ended.")
    finally:
        logger.removeHandler(handler)


def last_lines(path: Path, most: int) -> list[str]:
    """The last lines of a log, at most `most`; none if it cannot be read."""
    try:
        content = path.read_bytes()
    except OSError:
        return []
    # A power cut may leave a torn line, or zeros.
    lines = (one_line(line) for line in content.decode(errors="replace").split("\n"))
    return [line for line in lines if line][-most:]


class _Handler(logging.Handler):
    """Appends the messages of the thread that made it."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.INFO)
        self._path, self._thread = path, threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        detailed = record.name.startswith(DETAILED) and record.levelno < logging.WARNING
        # Tests and simulations run several agents in one process.
        kept = getattr(record, "kept", True)
        if record.thread == self._thread and kept and not detailed:
            self.note(record.getMessage())

    def note(self, message: str) -> None:
        """Append `message` as one line, with the local time. A full disk ends no training."""
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        line = f"{now} {one_line(message, LONGEST_LINE)}"
        try:
            if append(self._path, line) > MOST_BYTES:
                write_file(self._path, _newer_half(self._path.read_bytes()))
        except OSError:
            return


def append(path: Path, line: str) -> int:
    """Append `line` and flush it to the disk. Returns the size of the file in bytes."""
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # a power cut has torn the last line
                file.write(b"\n")
        file.write(f"{line}\n".encode())
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def _newer_half(content: bytes) -> bytes:
    """The newer half of the lines of `content`, by size."""
    return content[content.index(b"\n", len(content) // 2) + 1 :]
