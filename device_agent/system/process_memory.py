"""Memory of this process as Linux counts it. A figure is None if the system does not report it."""

import ctypes
import errno
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from profiles.documents.bundle_profile import Pages

M_MMAP_THRESHOLD = -3
LARGE_BYTES = 4 << 20
STATUS = Path("/proc/self/status")
MEMORY = Path("/proc/meminfo")
CLEAR = Path("/proc/self/clear_refs")
RAN_OUT = re.compile(
    r"[Ff]ailed to allocate[^\n]*|[Cc]annot allocate memory|bad_alloc|bad allocation"
    r"|failed to map segment|failed to reshape runtime|failed to create XNNPACK runtime"
    r"|can't alloc"
)
"""Messages of ONNX Runtime, LiteRT and the library loader if memory ran out."""


def resident_bytes() -> int | None:
    """The current resident set, in bytes."""
    return status_field("VmRSS")


def pages() -> "Pages | None":
    """The current resident set in two parts: RssAnon, and RssFile plus RssShmem."""
    from profiles.documents.bundle_profile import Pages

    anonymous, file = status_field("RssAnon"), status_field("RssFile")
    if anonymous is None or file is None:
        return None
    return Pages(anonymous_bytes=anonymous, file_bytes=file + (status_field("RssShmem") or 0))


def peak_bytes() -> int | None:
    """The highest resident set since the start of the process or the last `reset_peak`."""
    return status_field("VmHWM")


def available_bytes() -> int | None:
    """The memory in bytes that the system can give to processes without swapping."""
    return kilobytes(MEMORY, "MemAvailable")


def reset_peak() -> bool:
    """Reset the peak to the current resident set. Returns False if the system does not allow it.

    Without a reset, a new process has the peak of the program that ran in it before `exec`.
    """
    try:
        CLEAR.write_text("5")
    except OSError:
        return False
    return True


def status_field(name: str) -> int | None:
    """The field `name` of /proc/self/status in bytes."""
    return kilobytes(STATUS, name)


def kilobytes(file: Path, name: str) -> int | None:
    """The field `name` of `file` in bytes. The file counts in KiB."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def map_large_blocks() -> None:
    """Make glibc return large blocks of memory to the system as soon as they are freed.

    By default, glibc does this only for blocks above a threshold, and raises the threshold to the
    size of the largest freed block (up to 32 MB). It keeps smaller free blocks that are between
    used blocks. So by default it depends on chance how much memory glibc keeps.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


def release_unused() -> None:
    """Return free memory of this process to the system, if glibc supports it."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def ran_out(error: BaseException, who: str = "") -> MemoryError | None:
    """Convert `error` to a MemoryError if memory ran out; otherwise return None.

    `who` is the library that raised the error, for the message.
    """
    if isinstance(error, MemoryError):
        return error
    matched = RAN_OUT.search(str(error))
    if matched is None and getattr(error, "errno", None) != errno.ENOMEM:
        return None
    return MemoryError(f"{who} {matched[0]}" if who and matched else str(error))
