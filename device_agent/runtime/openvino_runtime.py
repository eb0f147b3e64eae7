"""OpenVINO on the processor, for ONNX bundles. Its package is an optional extra."""

import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from device_agent.runtime.graph_check import check_graph
from device_agent.runtime.openvino_probe import has_varying_kernels, keeps_kernels
from device_agent.runtime.runtime_errors import runtime_error
from device_agent.runtime.runtime_packages import OPENVINO
from device_agent.system.process_memory import ran_out, release_unused
from profiles.errors import BundleError

if TYPE_CHECKING:
    import openvino

Shapes = tuple[tuple[int, ...], ...]
"""The shapes of all inputs."""
CONVERTER = "openvino.tools.ovc"
BATCH_SIZES = 2
"""Batch sizes that a session keeps compiled: the usual one, and an epoch's last, smaller one."""
SINK = "/sink_port_0"
"""What the reader of ONNX files appends to the name of an output."""


def description() -> str:
    """Name and version of the library."""
    try:
        return f"{OPENVINO} {version(OPENVINO)}"
    except PackageNotFoundError:
        return OPENVINO


def load_core() -> "openvino.Core":
    """Load OpenVINO. Raises ImportError if it is not installed.

    Its model converter, which the package imports where it is found, reports every import to
    OpenVINO's maker. It is hidden during the import, so that nothing is sent.
    """
    hide = CONVERTER not in sys.modules
    if hide:
        sys.modules[CONVERTER] = None  # type: ignore[assignment]
    try:
        from openvino import Core
    finally:
        if hide:
            del sys.modules[CONVERTER]
    return Core()


class OpenvinoSession:
    """One graph, compiled for each batch size when it first comes. The caller owns the results."""

    def __init__(self, graph: Path, threads: int) -> None:
        """Load `graph` with `threads` threads (0: one for each core).

        Raises BundleError if OpenVINO is not installed or cannot load the graph, or must not.
        """
        self._graph = graph
        check_graph(graph)
        try:
            self._core = load_core()
        except ImportError as error:
            if (short := ran_out(error)) is not None:
                raise short from None
            raise BundleError(
                "OpenVINO cannot be loaded here: {reason}. Install it with `pip install "
                "'edgetailor[openvino]'`, or train with --runtime onnxruntime.",
                code="bundle.runtime-missing",
                runtime=OPENVINO,
                reason=str(error),
            ) from None
        self._settings = {
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": 1,
            # By default, processors with bfloat16 or float16 compute in these.
            "INFERENCE_PRECISION_HINT": "f32",
            # By default, layers with 8-bit weights round what they read to 8 bits, too.
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
            # Other programs share the device, perhaps another agent.
            "ENABLE_CPU_PINNING": False,
        }
        try:
            self._model = self._core.read_model(graph)
        except (RuntimeError, MemoryError) as error:
            raise openvino_error(error, graph, "is refused by") from None
        if has_varying_kernels(self._model) and keeps_kernels():
            raise BundleError(
                "{graph} has convolutions whose weights change, but on this processor {library} "
                "would go on with the weights of the first step. Train with --runtime onnxruntime.",
                code="bundle.kept-weights",
                graph=graph.name,
                runtime=OPENVINO,
                library=description(),
            )
        self._names = [given.node.friendly_name for given in self._model.inputs]
        self._results = [
            result.node.friendly_name.removesuffix(SINK) for result in self._model.outputs
        ]
        self.inputs, self.outputs = frozenset(self._names), frozenset(self._results)
        self._compiled: dict[Shapes, openvino.InferRequest] = {}
        self._latest: Shapes | None = None

    def run(
        self, feeds: Mapping[str, np.ndarray], over: Mapping[str, str] | None = None
    ) -> dict[str, np.ndarray]:
        """See Session. OpenVINO has its own memory for results; they are copied over inputs."""
        arrays = [feeds[name] for name in self._names]
        try:
            found = self._request(arrays).infer(arrays, share_inputs=True, share_outputs=True)
        except (RuntimeError, MemoryError) as error:
            raise openvino_error(error, self._graph, "failed in") from None
        results = {}
        for number, name in enumerate(self._results):
            if over and name in over:
                results[name] = feeds[over[name]]
                np.copyto(results[name], found[number])
            else:
                results[name] = found[number].copy()
        return results

    def _request(self, arrays: list[np.ndarray]) -> "openvino.InferRequest":
        """The graph compiled for inputs of these shapes.

        A graph of open shapes is refused, because the gradient of a convolution's filter has the
        batch as channels.
        """
        shapes = tuple(array.shape for array in arrays)
        if self._latest is not None and shapes != self._latest:
            # The tensors between inputs and outputs exist for one batch size at a time.
            self._compiled[self._latest].get_compiled_model().release_memory()
            release_unused()
        if shapes not in self._compiled:
            if len(self._compiled) == BATCH_SIZES:
                del self._compiled[next(iter(self._compiled))]
            self._model.reshape(dict(enumerate(map(list, shapes))))
            compiled = self._core.compile_model(self._model, "CPU", self._settings)
            self._compiled[shapes] = compiled.create_infer_request()
            release_unused()  # what compiling took
        self._latest = shapes
        return self._compiled[shapes]


def openvino_error(error: Exception, graph: Path, trouble: str) -> Exception:
    """The exception to raise for `error`; see `runtime_error`.

    The first lines of OpenVINO's messages name its source files; the last line says what is wrong.
    """
    reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
    told = ran_out(error) or RuntimeError(f"{reason}. Train with --runtime onnxruntime.")
    return runtime_error(told, graph, trouble, description())
