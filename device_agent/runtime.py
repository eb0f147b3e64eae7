"""Runtimes: what executes a graph. One module each, chosen by the manifest's `runtime`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from device_agent.litert_runtime import LitertSession
from device_agent.litert_runtime import description as litert
from device_agent.manifest import Runtime
from device_agent.onnx_runtime import DESCRIPTION, OnnxSession


class Session(Protocol):
    """A loaded signature. It is released by dropping the last reference to it."""

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """All outputs by name; the arrays are new ones, never views of the feeds."""
        ...


def open_session(runtime: Runtime, graph: Path, signature: str, threads: int) -> Session:
    """Load `signature`, which is in the file `graph`.

    Raises BundleError where the runtime is not there or does not take it.
    """
    if runtime == "litert":
        return LitertSession(graph, signature, threads)
    return OnnxSession(graph, threads)


def describe(runtime: Runtime) -> str:
    """Name and version of the library behind `runtime`."""
    return litert() if runtime == "litert" else DESCRIPTION
