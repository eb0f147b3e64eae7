"""The log of a device's rounds: rounds.log in the state folder.

After a power cut, the system's journal may lack the last lines. This log is flushed to the disk
after each line, and the file stays small.
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
"""If a file grows beyond this, only the newer half of its lines is kept."""
LONGEST_LINE = 500
"""The most characters of a line that are kept."""
DETAILED = "device_agent.training"
"""This package logs batches and epochs, which would wear out an SD card. Only its warnings are
kept."""

NOT_KEPT = {"kept": False}
"""`extra` of a line that is not kept: lines about each downloaded file would hide the others."""


@contextmanager
def kept_log(path: Path) -> Iterator[None]:
    """While the block runs, also write this thread's log lines to `path`.

    The last line states how the block ended.
    """
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
    """The last lines of a log, at most `most` lines. Empty if the log cannot be read."""
    try:
        content = path.read_bytes()
    except OSError:
        return []
    # A power cut may leave a torn line, or zeros.
    lines = (one_line(line) for line in content.decode(errors="replace").split("\n"))
    return [line for line in lines if line][-most:]


class _Handler(logging.Handler):
    """Appends the messages of the thread that created this handler."""

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
        """Append `message` as one line, with the local time. If the disk is full, do nothing."""
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
    """The second half of `content`, from the next start of a line."""
    return content[content.index(b"\n", len(content) // 2) + 1 :]
