"""Numbers normalised by channel, and names by letter."""

import unicodedata
from collections.abc import Sequence

import numpy as np


def normalised(values: np.ndarray, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """(values - mean) / std as float32, computed in float64; channels are the last axis.

    Examples:
        >>> normalised(np.array([[1.0, 4.0]]), mean=(1.0, 2.0), std=())
        array([[0., 2.]], dtype=float32)
    """
    # No numbers stand for a mean of 0 and a standard deviation of 1.
    shifted: np.ndarray = (values - np.asarray(mean or 0.0)) / np.asarray(std or 1.0)
    return shifted.astype(np.float32)


def composed(text: str) -> str:
    """`text` with each letter as one character (NFC): macOS writes the accents by themselves."""
    return unicodedata.normalize("NFC", text)
