"""Local data from a Python function that the device's owner wrote."""

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

DataFunction = Callable[[], Any]


def is_reference(source: str) -> bool:
    """Whether `source` names a function (`module:callable`) instead of a file."""
    module, colon, name = source.partition(":")
    return bool(colon) and name.isidentifier() and not Path(source).exists() and "/" not in module


def load_function(source: str) -> DataFunction:
    """Import the owner's function. Modules in the current folder can be imported.

    Args:
        source: The function as `module:callable`.

    Returns:
        The function. It is not called.

    Raises:
        DataError: The module cannot be imported or has no such function.
    """
    name, _, function = source.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        # stdout is for the command's own output. If the code changes the folder, this is undone.
        with redirect_stdout(sys.stderr), chdir("."):
            loaded: DataFunction = getattr(importlib.import_module(name), function)
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:  # the owner's code may raise anything
        raise DataError(
            "{function} cannot be loaded: {reason}.",
            code="data.function-not-loaded",
            function=source,
            reason=said_by(error),
        ) from None
    return loaded


def call_function(source: str) -> tuple[object, object]:
    """Call the owner's function.

    Args:
        source: The function as `module:callable`.

    Returns:
        The samples x and the labels y: each a numpy array, or a mapping of several.

    Raises:
        DataError: The function cannot be imported, fails or does not return x and y.
    """
    data_function = load_function(source)
    try:
        with redirect_stdout(sys.stderr), chdir("."):
            return _samples_and_labels(data_function())
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:
        kind = type(error).__name__
        raise DataError(
            "{function} failed: {error}: {reason}.",
            code="data.function-failed",
            function=source,
            error=kind,
            reason=said_by(error),
        ) from None


def _samples_and_labels(returned: Any) -> tuple[object, object]:
    """Unpack `returned`. Raises TypeError for types that would be silently misread."""
    # Unpacking a dict yields its keys.
    if isinstance(returned, Mapping):
        raise TypeError("it must return x and y, not a mapping that contains them")
    x, y = returned
    return _arrays(x), _arrays(y)


def _arrays(returned: Any) -> object:
    """Convert `returned`, or each value of a mapping of several arrays, to a numpy array."""
    if isinstance(returned, Mapping):
        return {name: _arrays(array) for name, array in returned.items()}
    # numpy drops the mask without a warning.
    if isinstance(returned, np.ma.MaskedArray):
        raise TypeError("masked arrays are not supported; remove or fill the masked samples")
    return np.asarray(returned)
