"""Converts a runtime's exceptions to MemoryError, DataError or BundleError."""

from pathlib import Path

from device_agent.system.process_memory import ran_out
from profiles.errors import BundleError, DataError

WRONG_INDEX = (
    "out of data bounds",  # onnxruntime: Gather, GatherElements
    "invalid index found",  # onnxruntime: GatherND
    "index out of bounds",  # LiteRT
    "has_only_positive_elements",  # LiteRT
)


def runtime_error(error: Exception, graph: Path, trouble: str, library: str) -> Exception:
    """Convert `error`, which `library` raised for `graph`, to the exception of the agent.

    The result is a MemoryError if memory ran out. It is a DataError if a number in the samples is
    an id without a row in a table. Otherwise it is a BundleError. `trouble` is the verb of the
    message, for example "failed in".
    """
    short = ran_out(error, library)
    if short is not None:
        return short
    reason = str(error).strip().split("\n")[0] or type(error).__name__
    if any(text in reason for text in WRONG_INDEX):
        return DataError(
            "The samples contain ids that the model does not have. Correct them, or use a model "
            "with more ids. {library} says: {reason}",
            code="data.unknown-ids",
            library=library,
            reason=reason,
        )
    return BundleError(
        "{path} {failure} {library}: {reason}",
        code="bundle.unusable-graph",
        graph=graph.name,
        path=graph,
        failure=trouble,
        library=library,
        reason=reason,
    )
