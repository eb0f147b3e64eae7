"""Normalises numbers by mean and standard deviation, and names by Unicode form."""

import unicodedata
from collections.abc import Sequence

import numpy as np


def normalised(values: np.ndarray, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """(values - mean) / std as float32, computed in float64; channels are the last axis.

    Examples:
        >>> normalised(np.array([[1.0, 4.0]]), mean=(1.0, 2.0), std=())
        array([[0., 2.]], dtype=float32)
    """
    # An empty sequence means a mean of 0 or a standard deviation of 1.
    shifted: np.ndarray = (values - np.asarray(mean or 0.0)) / np.asarray(std or 1.0)
    return shifted.astype(np.float32)


def composed(text: str) -> str:
    """Write each letter of `text` as one character (NFC). macOS writes accents separately."""
    return unicodedata.normalize("NFC", text)
