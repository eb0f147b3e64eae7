"""The 1,797 handwritten digits of scikit-learn."""

import numpy as np
from sklearn.datasets import load_digits

WHITE = 16.0
"""The brightest value in the scans."""


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Load the images `x` (n, 1, 8, 8), float32 from 0 to 1, and the labels `y` (n,), int64."""
    x, y = load_digits(return_X_y=True)
    return (x / WHITE).astype(np.float32).reshape(-1, 1, 8, 8), y.astype(np.int64)
