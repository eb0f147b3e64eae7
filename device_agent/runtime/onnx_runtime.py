"""Stock ONNX Runtime, on the processor."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime

from device_agent.runtime.runtime_errors import in_words
from device_agent.system.process_memory import release_unused

DESCRIPTION = f"onnxruntime {onnxruntime.__version__}"
LARGEST_FOLDED = 2**20
"""Largest tensor, in bytes, that a session computes from constants when it is opened."""
DTYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64}


def session_options(threads: int) -> onnxruntime.SessionOptions:
    """How the agent opens graphs, with `threads` threads (0: one for each core)."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # what fails is raised as well
    # A planned block would come on top of what the arena took in the first run, and a dead
    # tensor's memory would wait for the next one of its shape.
    options.enable_mem_pattern = False
    options.enable_mem_reuse = False
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # A large constant, as the zeros that an embedding's gradient is added to, would be held from
    # run to run; made anew each time it lives for an instant.
    options.add_session_config_entry(
        "optimization.constant_folding_max_output_size_in_bytes", str(LARGEST_FOLDED)
    )
    return options


def arena() -> str:
    """How the sessions keep memory."""
    options = session_options(1)
    settings = {
        "CPU arena": options.enable_cpu_mem_arena,
        "memory pattern": options.enable_mem_pattern,
        "buffer reuse": options.enable_mem_reuse,
    }
    return ", ".join(f"{name} {'on' if on else 'off'}" for name, on in settings.items())


class OnnxSession:
    """One graph in a session of its own; results are the caller's, inputs are never written to.

    Memory that a run takes is kept for the next one and returned when the session is dropped.
    """

    def __init__(self, graph: Path, threads: int) -> None:
        """Load `graph` with `threads` threads (0: as many as the machine has cores).

        Raises BundleError where ONNX Runtime does not take it.
        """
        options = session_options(threads)
        self._graph = graph
        try:
            self._session = onnxruntime.InferenceSession(
                str(graph),
                options,
                providers=["CPUExecutionProvider"],
                # What a graph computes twice, it does to save memory.
                disabled_optimizers=["CommonSubexpressionElimination"],
            )
        except Exception as error:  # onnxruntime's exceptions have no public base
            raise in_words(error, graph, "is refused by", DESCRIPTION) from None
        release_unused()  # the parsed file, and weights in the layouts that it passed through
        self._outputs = {
            output.name: (output.shape, DTYPES[output.type])
            for output in self._session.get_outputs()
        }
        self.inputs = frozenset(given.name for given in self._session.get_inputs())
        self.outputs = frozenset(self._outputs)

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """See Session."""
        binding = self._session.io_binding()
        inputs = {name: np.asarray(array, order="C") for name, array in feeds.items()}
        for name, array in inputs.items():
            binding.bind_cpu_input(name, array)
        # A result in the arena's memory would keep all of it from going back.
        results = {}
        for name, (shape, dtype) in self._outputs.items():
            if all(isinstance(size, int) for size in shape):
                results[name] = array = np.empty(shape, dtype)
                binding.bind_output(name, "cpu", 0, dtype, array.shape, array.ctypes.data)
            else:
                binding.bind_output(name)
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:
            raise in_words(error, self._graph, "failed in", DESCRIPTION) from None
        for name, value in zip(self._outputs, binding.get_outputs(), strict=True):
            if name not in results:
                results[name] = value.numpy().copy()
        return results
