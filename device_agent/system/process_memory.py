"""Memory of this process as Linux counts it. None where the system does not say."""

import ctypes
import errno
import re
import sys
from pathlib import Path

from profiles.documents.bundle_profile import Pages

M_MMAP_THRESHOLD = -3
LARGE_BYTES = 4 << 20
STATUS = Path("/proc/self/status")
MEMORY = Path("/proc/meminfo")
CLEAR = Path("/proc/self/clear_refs")
RAN_OUT = re.compile(
    r"[Ff]ailed to allocate[^\n]*|[Cc]annot allocate memory|bad_alloc|bad allocation"
    r"|failed to map segment|failed to reshape runtime|failed to create XNNPACK runtime"
)
"""How ONNX Runtime, LiteRT and the loader of libraries say that there is no memory."""


def resident_bytes() -> int | None:
    """Resident set now."""
    return status_field("VmRSS")


def pages() -> Pages | None:
    """Resident set now, in two parts: RssAnon, and RssFile with RssShmem."""
    anonymous, file = status_field("RssAnon"), status_field("RssFile")
    if anonymous is None or file is None:
        return None
    return Pages(anonymous_bytes=anonymous, file_bytes=file + (status_field("RssShmem") or 0))


def peak_bytes() -> int | None:
    """Highest resident set since the process began or `reset_peak` was called."""
    return status_field("VmHWM")


def available_bytes() -> int | None:
    """What the system can give to processes without swapping."""
    return kilobytes(MEMORY, "MemAvailable")


def reset_peak() -> bool:
    """Let the peak start from the present resident set; False where that is not possible.

    A new process carries the peak of whatever it was before it became this program.
    """
    try:
        CLEAR.write_text("5")
    except OSError:
        return False
    return True


def status_field(name: str) -> int | None:
    """A field of /proc/self/status as bytes."""
    return kilobytes(STATUS, name)


def kilobytes(file: Path, name: str) -> int | None:
    """A field of a `file` that counts in kB, as bytes."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def map_large_blocks() -> None:
    """Let large blocks of memory go back to the system at once when they are freed.

    glibc otherwise raises its threshold to the largest block that was freed, up to 32 MB, and keeps
    what lies between others: how much of that is chance.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


def release_unused() -> None:
    """Give memory that is free within this process back to the system, where glibc can."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def ran_out(error: BaseException, who: str = "") -> MemoryError | None:
    """The MemoryError that `error` of the library `who` stands for; None for another trouble."""
    if isinstance(error, MemoryError):
        return error
    found = RAN_OUT.search(str(error))
    if found is None and getattr(error, "errno", None) != errno.ENOMEM:
        return None
    return MemoryError(f"{who} {found[0]}" if who and found else str(error))
