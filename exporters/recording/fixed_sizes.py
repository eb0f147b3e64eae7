"""Notes where a model turns the number of samples into an integer while it is recorded."""

import traceback
from typing import Any
from unittest.mock import patch

import torch

from exporters.programs import source_lines
from exporters.recurrence.replacements import LOCK


class FixedSizes:
    """Context that notes the last conversion of a size into an integer, for example by `range`.

    Attributes:
        line: The user's line; empty if there was none.
    """

    def __init__(self) -> None:
        self.line = ""
        self._patches = [
            patch.object(torch.SymInt, name, self._noting(getattr(torch.SymInt, name)))
            for name in ("__index__", "__int__")
        ]

    def _noting(self, convert: Any) -> Any:
        """Wrap the method `convert` of sizes, so that it also notes the user's line."""

        def noting(size: torch.SymInt) -> Any:
            # The user's code may convert by numpy. Torch converts sizes, too, for example to print
            # them.
            callers = (f for f in reversed(traceback.extract_stack()[:-1]))
            caller = next(f for f in callers if not f.filename.startswith(source_lines.NUMPY))
            if source_lines.is_users(caller.filename):
                self.line = source_lines.innermost([(caller.filename, caller.lineno or 0)])
            return convert(size)

        return noting

    def __enter__(self) -> None:
        LOCK.acquire()
        for each in self._patches:
            each.start()

    def __exit__(self, *error: object) -> None:
        for each in self._patches:
            each.stop()
        LOCK.release()
