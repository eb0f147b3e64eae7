"""Runtimes: what executes a graph. One module each, chosen by the manifest's `runtime`."""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol

import numpy as np

from device_agent.runtime.litert_runtime import LitertSession
from device_agent.runtime.litert_runtime import description as litert
from device_agent.runtime.onnx_runtime import DESCRIPTION, OnnxSession
from device_agent.runtime.onnx_runtime import arena as onnx_arena
from profiles.errors import BundleError


class Session(Protocol):
    """A loaded signature. It is released by dropping the last reference to it.

    `inputs` and `outputs` are the names that it has in the graph.
    """

    inputs: frozenset[str]
    outputs: frozenset[str]

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """All outputs by name; the arrays are new ones, never views of the feeds."""
        ...


def open_session(runtime: str, graph: Path, signature: str, threads: int) -> Session:
    """Load `signature`, which is in the file `graph`.

    Raises BundleError where the runtime is not there or does not take it.
    """
    if runtime == "litert":
        return LitertSession(graph, signature, threads)
    if runtime != "onnx":
        raise BundleError(
            f"The bundle is for the runtime {runtime!r}; this agent runs onnx and litert bundles. "
            "Export it again with --format onnx."
        )
    return OnnxSession(graph, threads)


def describe(runtime: str) -> str:
    """Name and version of the library behind `runtime`."""
    if runtime == "litert":
        return litert()
    return DESCRIPTION if runtime == "onnx" else runtime


def arena(runtime: str) -> str:
    """How `runtime` keeps memory between operators and runs."""
    return onnx_arena() if runtime == "onnx" else "one arena, planned ahead"


def versions() -> dict[str, str]:
    """Versions of what takes part beside Python and the runtime, which the machine names."""
    found = {"numpy": np.__version__}
    try:
        return {"edgetailor": version("edgetailor"), **found}
    except PackageNotFoundError:  # run from a checkout
        return found
