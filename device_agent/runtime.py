"""Runtimes: what executes a graph. One module each, chosen by the manifest's `runtime`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from device_agent import onnx_runtime
from profiles.errors import BundleError


class Session(Protocol):
    """A loaded graph. It is released by dropping the last reference to it."""

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """All outputs by name; the arrays are new ones, never views of the feeds."""
        ...


def open_session(runtime: str, graph: Path, threads: int) -> Session:
    """Load `graph`. Raises BundleError where the runtime is not there or does not take it."""
    if runtime != "onnx":
        raise BundleError(
            f"The bundle is for the runtime {runtime!r}; this agent runs onnx bundles. "
            "Export it again with --format onnx."
        )
    return onnx_runtime.OnnxSession(graph, threads)


def describe(runtime: str) -> str:
    """Name and version of the library behind `runtime`."""
    return onnx_runtime.DESCRIPTION if runtime == "onnx" else runtime
