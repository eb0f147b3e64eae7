"""Predicts with a deployed model, with nothing but its card and its graph: without EdgeTailor.

    pip install onnxruntime numpy
    python predict_by_card.py deployed/board samples.npy

samples.npy has samples (n, ...) in the shape that the card gives.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime


def probabilities(folder: Path, samples: np.ndarray) -> np.ndarray:
    """The probabilities of the classes for each of `samples` (n, ...)."""
    card = json.loads((folder / "card.json").read_text())
    output = samples.astype(card["input"]["dtype"])
    for graph in card["graphs"]:  # several if the model runs in stages: one is in memory at a time
        session = onnxruntime.InferenceSession(folder / graph["file"])
        (output,) = session.run([graph["output"]], {graph["input"]: output})
    match card["output"]["probabilities"]:
        case "softmax":
            axis = card["output"]["class_axis"]
            powers = np.exp(output - output.max(axis, keepdims=True))
            return np.asarray(powers / powers.sum(axis, keepdims=True))
        case "sigmoid":
            return np.asarray(1 / (1 + np.exp(-output)))
        case _:
            return np.asarray(output)


if __name__ == "__main__":
    print(probabilities(Path(sys.argv[1]), np.load(sys.argv[2])).round(4))
