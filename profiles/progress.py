"""Reports the progress of work that takes seconds: the caller gets the name of each stage."""

from collections.abc import Callable

Report = Callable[[str], None]
"""A function that is called with the name of each stage when it begins."""


def silent(stage: str) -> None:
    """Ignore the name of a stage."""
