"""A function of the device's owner as a source of local data."""

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

from profiles.errors import DataError
from profiles.text_formatting import said_by

Source = Callable[[], Any]


def is_reference(source: str) -> bool:
    """Whether `source` names a function and not a file."""
    module, colon, name = source.partition(":")
    return bool(colon) and name.isidentifier() and not Path(source).exists() and "/" not in module


def load_function(source: str) -> Source:
    """The function `module:callable`; the current folder is importable. Raises DataError."""
    name, _, function = source.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        # Neither its words nor its folder become this program's.
        with redirect_stdout(sys.stderr), chdir("."):
            found: Source = getattr(importlib.import_module(name), function)
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:  # the owner's code may raise anything
        raise DataError(f"{source} cannot be loaded: {said_by(error)}.") from None
    return found


def from_callable(source: str) -> tuple[np.ndarray, np.ndarray]:
    """What the function `module:callable` returns. Raises DataError."""
    found = load_function(source)
    try:
        with redirect_stdout(sys.stderr), chdir("."):
            return _pair(found())
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:
        kind = type(error).__name__
        raise DataError(f"{source} failed: {kind}: {said_by(error)}.") from None


def _pair(returned: Any) -> tuple[np.ndarray, np.ndarray]:
    """`x` and `y` of what a function returned. Raises TypeError for what would be misread."""
    if isinstance(returned, Mapping):
        raise TypeError("it must return x and y, not a table of them")
    x, y = returned
    if isinstance(x, np.ma.MaskedArray) or isinstance(y, np.ma.MaskedArray):
        raise TypeError("masked arrays are not taken; leave the samples out, or fill them")
    return np.asarray(x), np.asarray(y)
