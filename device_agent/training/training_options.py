"""Options of one training, and the kinds of local data that it accepts."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np

# A text, so that parsing the command line does not import numpy.
Data: TypeAlias = "str | Path | tuple[np.ndarray, np.ndarray] | Mapping[str, np.ndarray]"
"""Local data: a file or folder, a function `module:callable`, or the arrays x and y themselves."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How to train a bundle. One object is handed on from the command to the schedule interpreter.

    Attributes:
        threads: Threads of the runtime. 0 means one for each core.
        seed: Seed for the order of the samples and for dropout. With one thread, the same seed
            gives the same update, bit for bit.
        validation: Share of the samples, in [0, 1), that is held out and evaluated
            after each epoch.
        max_memory: Bytes of memory that this process may use. None means no limit of the owner's.
    """

    threads: int = 0
    seed: int = 0
    validation: float = 0.0
    max_memory: int | None = None


DEFAULT_OPTIONS = TrainingOptions()
