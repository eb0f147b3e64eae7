"""LiteRT (TensorFlow Lite) on the processor. An extra: its package is not on every device."""

import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from profiles.errors import BundleError

PACKAGE = "ai-edge-litert"


def description() -> str:
    """Name and version of the library."""
    try:
        return f"{PACKAGE} {version(PACKAGE)}"
    except PackageNotFoundError:
        return PACKAGE


class LitertSession:
    """One signature of a TFLite file, for batches of any size."""

    def __init__(self, graph: Path, signature: str, threads: int) -> None:
        """Load `signature` of `graph` with `threads` threads (0: as many as there are cores).

        Raises BundleError where LiteRT is not installed or does not take it.
        """
        try:
            from ai_edge_litert.interpreter import Interpreter
        except ImportError as error:
            raise BundleError(
                f"The bundle is for LiteRT, which cannot be loaded here: {error}. Install it with "
                "`pip install 'edgetailor[litert]'`, or export the bundle with --format onnx."
            ) from None
        try:
            interpreter = Interpreter(str(graph), num_threads=threads or os.cpu_count() or 1)
            self._run = interpreter.get_signature_runner(signature)
        except (ValueError, RuntimeError) as error:
            reason = str(error).strip().split("\n")[0]
            raise BundleError(f"{graph} is refused by {description()}: {reason}") from None

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """See Session."""
        results: dict[str, np.ndarray] = self._run(**feeds)
        return results
