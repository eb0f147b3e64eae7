"""The choice of the runtime that executes a graph: the one in the manifest, or OpenVINO."""

from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import numpy as np

from device_agent.runtime.litert_runtime import LitertSession
from device_agent.runtime.litert_runtime import description as litert
from device_agent.runtime.onnx_runtime import DESCRIPTION, OnnxSession
from device_agent.runtime.onnx_runtime import arena as onnx_arena
from device_agent.runtime.openvino_runtime import OpenvinoSession
from device_agent.runtime.openvino_runtime import description as openvino
from device_agent.runtime.runtime_packages import LITERT, OPENVINO
from profiles.errors import BundleError


class Session(Protocol):
    """A loaded signature. Dropping the last reference releases it.

    `inputs` and `outputs` are the names of its inputs and outputs in the graph.
    """

    inputs: frozenset[str]
    outputs: frozenset[str]

    def run(
        self, feeds: Mapping[str, np.ndarray], over: Mapping[str, str] | None = None
    ) -> dict[str, np.ndarray]:
        """Run the graph once.

        Args:
            feeds: All inputs by name.
            over: Outputs that may be written over an input, with its name. The runtime decides
                whether it does. If the run fails, such an input may have any content.

        Returns:
            All outputs by name. The arrays are new, except that those of `over` may be its inputs.
        """
        ...


def open_session(runtime: str, graph: Path, signature: str, threads: int) -> Session:
    """Load a signature.

    Args:
        runtime: Name of the runtime in the manifest, or OPENVINO for a graph in ONNX format.
        graph: The file that holds the signature.
        signature: Name of the signature.
        threads: Number of threads; 0 is one for each core.

    Raises:
        BundleError: The runtime is unknown or not installed, or it cannot load the graph.
        MemoryError: The process has not enough memory for the graph.
    """
    if runtime == "litert":
        return LitertSession(graph, signature, threads)
    if runtime == OPENVINO:
        return OpenvinoSession(graph, threads)
    if runtime != "onnx":
        raise BundleError(
            "The bundle is for the runtime {runtime!r}; this agent runs onnx and litert bundles. "
            "Export it again with --format onnx.",
            code="bundle.unknown-runtime",
            runtime=runtime,
        )
    return OnnxSession(graph, threads)


def alternatives(runtime: str) -> tuple[str, ...]:
    """Other installed runtimes that may take the graphs of a bundle for `runtime`."""
    return (OPENVINO,) if runtime == "onnx" and find_spec(OPENVINO) is not None else ()


def describe(runtime: str) -> str:
    """Name and version of the library of `runtime`."""
    if runtime == "litert":
        return litert()
    if runtime == OPENVINO:
        return openvino()
    return DESCRIPTION if runtime == "onnx" else runtime


def arena(runtime: str) -> str:
    """How `runtime` manages memory between operators and runs, as text."""
    if runtime == "onnx":
        return onnx_arena()
    return "one arena, planned ahead" + (" for each batch size" if runtime == OPENVINO else "")


def all_versions() -> dict[str, str]:
    """Versions of the agent, of numpy and of all installed runtimes, by package."""
    found = versions()
    for package in ("onnxruntime", OPENVINO, LITERT):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def versions() -> dict[str, str]:
    """Versions of edgetailor and numpy; a profile names Python and the runtime elsewhere."""
    found = {"numpy": np.__version__}
    try:
        return {"edgetailor": version("edgetailor"), **found}
    except PackageNotFoundError:  # run from a checkout
        return found
