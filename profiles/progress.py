"""Progress of work that takes seconds: stages by name, for whoever called it."""

from collections.abc import Callable

Report = Callable[[str], None]
"""Called with the name of each stage when it begins."""


def silent(stage: str) -> None:
    """Ignore the name of a stage."""
