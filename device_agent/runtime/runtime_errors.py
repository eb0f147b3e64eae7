"""What a runtime's own exceptions mean: that there is no memory, or that a graph is not right."""

from pathlib import Path

from device_agent.system.process_memory import ran_out
from profiles.errors import BundleError


def in_words(error: Exception, graph: Path, trouble: str, library: str) -> Exception:
    """What to raise in place of `error`, which `library` raised at `graph`: a MemoryError where it
    has run out, else a BundleError that says which `trouble` there is.
    """
    short = ran_out(error, library)
    if short is not None:
        return short
    reason = str(error).strip().split("\n")[0] or type(error).__name__
    return BundleError(f"{graph} {trouble} {library}: {reason}")
