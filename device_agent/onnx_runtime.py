"""Stock ONNX Runtime, on the processor."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime

from profiles.errors import BundleError

DESCRIPTION = f"onnxruntime {onnxruntime.__version__}"


class OnnxSession:
    """One graph in a session of its own; results are copies, inputs are never written to."""

    def __init__(self, graph: Path, threads: int) -> None:
        """Load `graph` with `threads` threads (0: as many as the machine has cores).

        Raises BundleError where ONNX Runtime does not take it.
        """
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # The arena keeps what it once took: without it a device gets its memory back.
        options.enable_cpu_mem_arena = False
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._session = onnxruntime.InferenceSession(
                str(graph), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime's exceptions have no public base
            reason = str(error).split("\n")[0]
            raise BundleError(f"{graph} is refused by {DESCRIPTION}: {reason}") from None
        self._outputs = [output.name for output in self._session.get_outputs()]

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """See Session."""
        results = self._session.run(self._outputs, dict(feeds))
        return dict(zip(self._outputs, results, strict=True))
