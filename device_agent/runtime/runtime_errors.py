"""Translation of a runtime's exceptions into MemoryError or BundleError."""

from pathlib import Path

from device_agent.system.process_memory import ran_out
from profiles.errors import BundleError


def runtime_error(error: Exception, graph: Path, trouble: str, library: str) -> Exception:
    """Convert `error`, which `library` raised for `graph`, to the exception to raise.

    It is a MemoryError if memory ran out, otherwise a BundleError. `trouble` is the verb of the
    message, for example "failed in".
    """
    short = ran_out(error, library)
    if short is not None:
        return short
    reason = str(error).strip().split("\n")[0] or type(error).__name__
    return BundleError(
        "{path} {failure} {library}: {reason}",
        code="bundle.unusable-graph",
        graph=graph.name,
        path=graph,
        failure=trouble,
        library=library,
        reason=reason,
    )
