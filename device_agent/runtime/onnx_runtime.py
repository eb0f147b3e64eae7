"""Unmodified ONNX Runtime on the processor."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime

from device_agent.runtime.graph_check import check_graph
from device_agent.runtime.runtime_errors import runtime_error
from device_agent.system.process_memory import release_unused

LARGEST_FOLDED = 2**20
"""The largest tensor, in bytes, that a session computes from constants when it opens."""
SPIN_US = 50
"""How long a thread spins (waits busily) for more work before it sleeps, in microseconds."""
LIMITS_SPINNING = tuple(map(int, onnxruntime.__version__.split(".")[:2])) >= (1, 26)
"""Whether the runtime can limit spinning. Without a limit, threads spin for milliseconds."""
DTYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64}


def description() -> str:
    """Name and version of the library."""
    return f"onnxruntime {onnxruntime.__version__}"


def session_options(threads: int) -> onnxruntime.SessionOptions:
    """Create the options with which the agent opens graphs. 0 threads means one for each core."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # fatal only: other errors are raised anyway
    # A memory pattern would add a planned block to the memory that the arena requested in the first
    # run. Buffer reuse would keep the memory of a dead tensor for another tensor of this shape.
    options.enable_mem_pattern = False
    options.enable_mem_reuse = False
    # Waking a thread takes longer than many operators. A short busy wait between two operators is
    # cheaper, but a long wait keeps the processor from other work.
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(LIMITS_SPINNING)))
    if LIMITS_SPINNING:
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_US))
    # A session would keep a large folded constant between runs, for example the zeros to which an
    # embedding's gradient is added. If it is computed in each run, it exists only for a moment.
    options.add_session_config_entry(
        "optimization.constant_folding_max_output_size_in_bytes", str(LARGEST_FOLDED)
    )
    return options


def arena() -> str:
    """The memory settings of a session, as text for a profile."""
    options = session_options(1)
    settings = {
        "CPU arena": options.enable_cpu_mem_arena,
        "memory pattern": options.enable_mem_pattern,
        "buffer reuse": options.enable_mem_reuse,
    }
    return ", ".join(f"{name} {'on' if on else 'off'}" for name, on in settings.items())


def open_model(model: str | bytes, threads: int) -> onnxruntime.InferenceSession:
    """Open a session for a graph, given as a path or as bytes, with the agent's options."""
    return onnxruntime.InferenceSession(
        model,
        session_options(threads),
        providers=["CPUExecutionProvider"],
        # Graphs compute some tensors twice on purpose, to save memory.
        disabled_optimizers=["CommonSubexpressionElimination"],
    )


def open_session(graph: Path, signature: str, threads: int) -> "OnnxSession":
    """Load the file `graph`, which has one signature."""
    return OnnxSession(graph, threads)


class OnnxSession:
    """One graph in its own session. The caller owns the results.

    The session keeps the memory of a run for the next run, until the session is released.
    """

    def __init__(self, graph: Path, threads: int) -> None:
        """Load `graph` with `threads` threads (0: one for each core).

        Raises BundleError if ONNX Runtime cannot load the graph, or if `check_graph` refuses it.
        """
        self._graph = graph
        check_graph(graph)
        try:
            self._session = open_model(str(graph), threads)
        except Exception as error:  # the exceptions of onnxruntime have no public base class
            raise runtime_error(error, graph, "is refused by", description()) from None
        release_unused()  # the parsed file, and weights in intermediate layouts
        self._outputs = {
            output.name: (output.shape, DTYPES[output.type])
            for output in self._session.get_outputs()
        }
        self._inputs = {given.name: given.shape for given in self._session.get_inputs()}
        self.inputs = frozenset(self._inputs)
        self.outputs = frozenset(self._outputs)

    def run(
        self, feeds: Mapping[str, np.ndarray], over: Mapping[str, str] | None = None
    ) -> dict[str, np.ndarray]:
        """See `Session.run`."""
        binding = self._session.io_binding()
        inputs = {name: np.asarray(array, order="C") for name, array in feeds.items()}
        for name, array in inputs.items():
            binding.bind_cpu_input(name, array)
        # A result in the arena would keep the whole arena in memory, so results get their own
        # arrays.
        results = {
            out: inputs[name]
            for out, name in (over or {}).items()
            if inputs[name].dtype == self._outputs[out][1]
        }
        lengths = self._lengths(inputs)
        try:
            for name, (named, dtype) in self._outputs.items():
                shape = [lengths.get(size, size) for size in named]
                # If an output is also an input of the graph, the runtime does not write it.
                if name not in inputs and all(isinstance(size, int) for size in shape):
                    if name not in results:
                        results[name] = np.empty(shape, dtype)
                    array = results[name]
                    binding.bind_output(name, "cpu", 0, dtype, array.shape, array.ctypes.data)
                else:
                    binding.bind_output(name)
            self._session.run_with_iobinding(binding)
        except Exception as error:
            raise runtime_error(error, self._graph, "failed in", description()) from None
        for name, value in zip(self._outputs, binding.get_outputs(), strict=True):
            if name not in results:
                results[name] = value.numpy().copy()
        return results

    def _lengths(self, inputs: Mapping[str, np.ndarray]) -> dict[object, int]:
        """The lengths of open axes, such as the batch's, by their names in the graph."""
        return {
            name: length
            for given, array in inputs.items()
            for name, length in zip(self._inputs[given], array.shape, strict=False)
            if isinstance(name, str)
        }
