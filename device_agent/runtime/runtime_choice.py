"""Chooses, by the manifest's `runtime`, the module that executes the graphs of a bundle."""

from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol

import numpy as np

from device_agent import __version__
from device_agent.runtime import litert_runtime, onnx_runtime
from device_agent.runtime.runtime_packages import LITERT
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
            over: Maps the name of an output to the input that it may overwrite. The runtime decides
                whether it does so. If the run fails, such an input may have any content.

        Returns:
            All outputs by name. Each array is new, but an output in `over` may be the array of the
            input that it overwrites.
        """
        ...


class Runtime(Protocol):
    """The functions that the module of a runtime defines."""

    def open_session(self, graph: Path, signature: str, threads: int) -> Session:
        """Load a signature from the file `graph`, see `open_session` below."""
        ...

    def description(self) -> str:
        """Name and version of the library."""
        ...

    def arena(self) -> str:
        """How the runtime manages memory between operators and runs, as text."""
        ...


RUNTIMES: Mapping[str, Runtime] = {"onnx": onnx_runtime, "litert": litert_runtime}
"""The modules by the name that manifests use."""


def runtime_of(name: str) -> Runtime:
    """The runtime with this `name` in manifests. Raises BundleError if the name is unknown."""
    if name not in RUNTIMES:
        raise BundleError(
            "The bundle is for the runtime {runtime!r}; this agent runs {known} bundles. Export it "
            "again with --format onnx.",
            code="bundle.unknown-runtime",
            runtime=name,
            known=" and ".join(RUNTIMES),
        )
    return RUNTIMES[name]


def open_session(runtime: str, graph: Path, signature: str, threads: int) -> Session:
    """Load a signature.

    Args:
        runtime: Name of the runtime in the manifest.
        graph: The file with the signature.
        signature: Name of the signature.
        threads: Number of threads; 0 means one for each core.

    Raises:
        BundleError: The runtime is unknown or not installed, or it cannot load the graph.
        MemoryError: The process does not have enough memory for the graph.
    """
    return runtime_of(runtime).open_session(graph, signature, threads)


def all_versions() -> dict[str, str]:
    """Versions of the agent, of numpy and of all installed runtimes, by package."""
    installed = versions()
    for package in ("onnxruntime", LITERT):
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


def versions() -> dict[str, str]:
    """Versions of edgetailor and numpy, for the field `versions` of a profile.

    Other fields of the profile have the versions of Python and of the runtime.
    """
    return {"edgetailor": __version__, "numpy": np.__version__}
