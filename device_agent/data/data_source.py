"""What local data may be given as."""

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np

# A text, so that parsing the command line does not import numpy.
Data: TypeAlias = "str | Path | tuple[np.ndarray, np.ndarray] | Mapping[str, np.ndarray]"
"""Local data: a file or folder, a function `module:callable`, or the arrays x and y themselves."""
