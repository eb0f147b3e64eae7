"""Checks that libraries load. Child processes load them: a broken library may crash its process."""

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from device_agent.doctor.finding import Finding, loading_remedy
from device_agent.runtime.runtime_packages import LITERT, unverified

LOADING_S = 120.0
LIBRARIES = {
    "msgspec": "msgspec",
    "urllib3": "urllib3",
    "cryptography": "cryptography.hazmat.primitives.asymmetric.ed25519",
    "safetensors": "safetensors",
    "numpy": "numpy",
    "onnxruntime": "onnxruntime",
}
"""The libraries that every agent needs, each with the module that loads its compiled code."""
LOAD = """
import importlib, sys
for name in sys.argv[1:]:
    print(name, flush=True)
    importlib.import_module(name)
print("graph", flush=True)
"""

# An ONNX file of opset 18 for y = x + x with one number. Its bytes are written out because no
# library on the device can write such a file.
TINY_GRAPH = (
    b"\x08\x08:5"  # model: IR version 8, and its graph of 53 bytes
    b'\n\x0e\n\x01x\n\x01x\x12\x01y"\x03Add'  # node: Add of x and x gives y
    b"\x12\x01g"  # the graph's name
    b"Z\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01"  # input x: float32, shape (1,)
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01"  # output y: the same
    b"B\x04\n\x00\x10\x12"  # opset 18 of the default domain
)
RUN_TINY = """
import sys, numpy, onnxruntime
s = onnxruntime.InferenceSession(sys.stdin.buffer.read(), providers=["CPUExecutionProvider"])
y = s.run(None, {"x": numpy.ones(1, numpy.float32)})[0][0]
print(onnxruntime.__version__, y)
"""
LOAD_LITERT = "from ai_edge_litert.interpreter import Interpreter"


def check_libraries() -> Iterator[Finding]:
    """Load all libraries and run a graph with ONNX Runtime."""
    # Do not test libraries that this process has loaded: a test takes seconds on a small board.
    good = [name for name, module in LIBRARIES.items() if module in sys.modules]
    left = [name for name in LIBRARIES if name not in good]
    while True:
        modules = [LIBRARIES[name] for name in left]
        code, said, errors = _python(LOAD + RUN_TINY, *modules, given=TINY_GRAPH)
        begun = [line for line in said if line in modules or line == "graph"]
        if not begun:
            yield _not_loaded("libraries", code, errors, "edgetailor")
            return
        if begun[-1] == "graph":
            break
        # The child ended while it loaded the last library that it named. Test those after it.
        bad = left[len(begun) - 1]
        good += left[: len(begun) - 1]
        left = left[len(begun) :]
        yield _not_loaded(bad, code, errors)
        if not left:
            break
    good += left
    if good:
        yield Finding.ok("libraries", f"{', '.join(good)} load")
    if "onnxruntime" in good:
        yield _ran(code, said, errors)


def check_litert() -> Finding:
    """Load LiteRT, which only LiteRT bundles need."""
    try:
        installed = version(LITERT)
    except PackageNotFoundError:
        return Finding.skip("litert", f"{LITERT} is not installed; only LiteRT bundles need it")
    code, _, errors = _python(LOAD_LITERT)
    if code:
        return _not_loaded("litert", code, errors, LITERT)
    return Finding.ok("litert", f"{installed} loads")


def _ran(code: int, said: list[str], errors: list[str]) -> Finding:
    """Report how the program that runs a graph ended."""
    last = said[-1] if said else ""
    if code == 0 and last.endswith(" 2.0"):
        installed = last.split()[0]
        return Finding.ok("onnxruntime", unverified(installed) or f"{installed} runs graphs")
    return Finding.fail(
        "onnxruntime",
        f"running a graph ended with exit code {code}: {errors[-1] if errors else 'no output'}",
        loading_remedy("\n".join(errors), "onnxruntime"),
    )


def _not_loaded(check: str, code: int, errors: list[str], package: str | None = None) -> Finding:
    reason = errors[-1] if errors else "no output"
    return Finding.fail(
        check,
        f"loading it ended with exit code {code}: {reason}",
        loading_remedy("\n".join(errors), package or check),
    )


def _python(code: str, *arguments: str, given: bytes = b"") -> tuple[int, list[str], list[str]]:
    """Run a Python program. Returns its exit code, and the lines of its output and its errors."""
    command = [sys.executable, "-c", code, *arguments]
    try:
        done = subprocess.run(command, input=given, capture_output=True, timeout=LOADING_S)
    except subprocess.TimeoutExpired:
        return 124, [], [f"not finished within {LOADING_S:.0f} s"]
    lines = [
        [line for line in stream.decode(errors="replace").splitlines() if line.strip()]
        for stream in (done.stdout, done.stderr)
    ]
    return done.returncode, lines[0], lines[1]
