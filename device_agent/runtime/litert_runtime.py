"""LiteRT (TensorFlow Lite) on the processor. Its package is an optional extra."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from device_agent.runtime.runtime_errors import runtime_error
from device_agent.runtime.runtime_packages import LITERT
from device_agent.system.process_memory import ran_out
from profiles.errors import BundleError


def description() -> str:
    """Name and version of the library."""
    try:
        return f"{LITERT} {version(LITERT)}"
    except PackageNotFoundError:
        return LITERT


def arena() -> str:
    """How LiteRT manages memory between operators and runs, as text."""
    return "one arena, planned ahead"


@contextmanager
def without_remarks() -> Iterator[None]:
    """Drop the INFO lines that LiteRT writes to stderr inside the block.

    Other output to stderr appears when the block ends.
    """
    try:
        # LiteRT writes from C++ to the file descriptor, which sys.stderr cannot redirect.
        stderr, room = os.dup(2), os.memfd_create("stderr")
    except (AttributeError, OSError):  # no stderr, or not Linux
        yield
        return
    with open(room, "w+b") as said:
        os.dup2(said.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            said.seek(0)
            os.write(2, b"".join(line for line in said if not line.startswith(b"INFO: ")))


def open_session(graph: Path, signature: str, threads: int) -> "LitertSession":
    """Load `signature` of the TFLite file `graph`."""
    return LitertSession(graph, signature, threads)


class LitertSession:
    """One signature of a TFLite file, for batches of any size."""

    def __init__(self, graph: Path, signature: str, threads: int) -> None:
        """Load `signature` of `graph` with `threads` threads (0: one for each core).

        Raises BundleError if LiteRT is not installed or cannot load the graph.
        """
        try:
            from ai_edge_litert.interpreter import Interpreter
        except ImportError as error:
            if (short := ran_out(error)) is not None:
                raise short from None
            raise BundleError(
                "The bundle is for LiteRT, which cannot be loaded here: {reason}. Install it with "
                "`pip install '.[litert]'` in the folder of EdgeTailor's source, or export the "
                "bundle with --format onnx.",
                code="bundle.runtime-missing",
                runtime="litert",
                reason=str(error),
            ) from None
        self._graph, self._ran = graph, False
        try:
            interpreter = Interpreter(str(graph), num_threads=threads or os.cpu_count() or 1)
            runner = interpreter.get_signature_runner(signature)
        except (ValueError, RuntimeError, OSError) as error:
            raise runtime_error(error, graph, "is refused by", description()) from None
        inputs, results = runner.get_input_details(), runner.get_output_details()
        self._numbers = [name for name, about in results.items() if not len(about["shape"])]
        self._input_index = {name: about["index"] for name, about in inputs.items()}
        self._result_index = {name: about["index"] for name, about in results.items()}
        self.inputs, self.outputs = frozenset(inputs), frozenset(results)
        # LiteRT gives access to its memory for results only for the first signature of a file, and
        # only without a runner.
        first = next(iter(interpreter.get_signature_list()))
        self._runner = None if signature == first else runner
        self._interpreter = interpreter

    def run(
        self, feeds: Mapping[str, np.ndarray], over: Mapping[str, str] | None = None
    ) -> dict[str, np.ndarray]:
        """See `Session.run`.

        LiteRT computes results in its own memory. After the run, each result in `over` is copied
        over the input that it may overwrite.
        """
        # LiteRT writes its INFO lines in the first run only; redirecting takes time.
        with nullcontext() if self._ran else without_remarks():
            results = self._run(feeds, over or {})
        self._ran = True
        return results

    def _run(
        self, feeds: Mapping[str, np.ndarray], over: Mapping[str, str]
    ) -> dict[str, np.ndarray]:
        # On 64-bit ARM, LiteRT 2.3.0 ends the process if an input is a scalar without an axis.
        given = {name: array.reshape(array.shape or 1) for name, array in feeds.items()}
        try:
            results: dict[str, np.ndarray]
            if self._runner is None:
                results = self._run_first(given, {name: feeds[old] for name, old in over.items()})
            else:
                results = self._runner(**given)
        except (ValueError, RuntimeError) as error:
            # When memory runs out, the message may be empty.
            if not str(error) or ran_out(error) is not None:
                raise MemoryError(f"{description()} cannot allocate its tensors") from None
            raise runtime_error(error, self._graph, "failed in", description()) from None
        # Because scalar inputs have an axis, scalar results have one, too. Remove it.
        return results | {name: results[name].reshape(()) for name in self._numbers}

    def _run_first(
        self, given: Mapping[str, np.ndarray], replaced: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Run the file's first signature, and copy results into the arrays in `replaced`, by name.

        A signature runner, LiteRT's usual interface, would create new arrays for the results.
        Filling new arrays takes longer than copying, because the system has to provide their pages.
        """
        interpreter = self._interpreter
        if given.keys() != self._input_index.keys():
            raise ValueError(f"its inputs are {sorted(self._input_index)}, not {sorted(given)}")
        for name, index in self._input_index.items():
            interpreter.resize_tensor_input(index, given[name].shape)
        interpreter.allocate_tensors()
        for name, index in self._input_index.items():
            interpreter.set_tensor(index, given[name])
        interpreter.invoke()
        results = {}
        for name, index in self._result_index.items():
            if name in replaced:
                results[name] = replaced[name]
                np.copyto(results[name], interpreter.tensor(index)().reshape(results[name].shape))
            else:
                results[name] = interpreter.get_tensor(index)
        return results
