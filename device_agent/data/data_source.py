"""The kinds of sources from which local data can be read."""

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np

# The type is a text, so that parsing the command line does not import numpy.
Data: TypeAlias = "str | Path | tuple[np.ndarray, np.ndarray] | Mapping[str, np.ndarray]"
"""Local data: a file or folder, a function `module:callable`, or the arrays x and y themselves."""

CSV = ".csv"


def needs_preparation(source: "Path") -> bool:
    """Whether `source` is a CSV file, or a folder of CSV files or of folders with pictures."""
    if not source.is_dir():
        return source.suffix.lower() == CSV
    # A folder of several arrays has x_NAME.npy and y_NAME.npy.
    names = ("x.npy", "y.npy", "x_*.npy", "y_*.npy")
    return not any(file for name in names for file in source.glob(name))
