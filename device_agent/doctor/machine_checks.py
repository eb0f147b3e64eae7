"""Checks of this machine: state folder, disk, runtimes, memory and sensors."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from device_agent.doctor.finding import Finding
from device_agent.federation.device_state import DeviceState
from device_agent.runtime import litert_runtime, openvino_runtime
from device_agent.system import sensors
from device_agent.training.memory_limits import ceilings
from profiles.errors import InputError
from profiles.text_formatting import format_bytes

LEAST_DISK = 200 * 10**6
"""Bytes of disk for a small model: the bundle, its update and recorded activations."""
LEAST_MEMORY = 150 * 10**6
"""Bytes of memory of the agent with a runtime and a small training step."""
LOADING_S = 120.0

# y = x + x of one number as an ONNX file of opset 18. The bytes are written out because the device
# has no library that could make the file.
TINY_GRAPH = (
    b"\x08\x08:5"  # model: IR version 8, and its graph of 53 bytes
    b'\n\x0e\n\x01x\n\x01x\x12\x01y"\x03Add'  # node: Add of x and x gives y
    b"\x12\x01g"  # the graph's name
    b"Z\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01"  # input x: float32, shape (1,)
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01"  # output y: the same
    b"B\x04\n\x00\x10\x12"  # opset 18 of the default domain
)
RUN_TINY = (
    "import sys, numpy, onnxruntime; "
    "s = onnxruntime.InferenceSession(sys.stdin.buffer.read(), "
    "providers=['CPUExecutionProvider']); "
    "y = s.run(None, {'x': numpy.ones(1, numpy.float32)})[0][0]; "
    "from device_agent.runtime.graph_form import device_form; "
    "print(onnxruntime.__version__, device_form() or 'plain', y)"
)
LOAD_LITERT = "from ai_edge_litert.interpreter import Interpreter"
LOAD_OPENVINO = (
    "from device_agent.runtime.openvino_runtime import load_core; load_core().get_versions('CPU')"
)


def check_machine(state: Path) -> Iterator[Finding]:
    """Check what training needs on this machine.

    Args:
        state: The state folder.
    """
    yield _writable(state)
    yield _disk(state)
    yield _onnx()
    yield _optional("litert", litert_runtime.PACKAGE, LOAD_LITERT, "LiteRT bundles need it")
    yield _optional(
        "openvino", openvino_runtime.PACKAGE, LOAD_OPENVINO, "--runtime openvino needs it"
    )
    yield _memory()
    yield _temperature()
    yield _power()


def _writable(state: Path) -> Finding:
    nearest = _nearest(state)
    if not nearest.is_dir():
        return Finding.fail("state", f"{nearest} is a file", "give a folder with --state")
    if not state.exists():
        return Finding.skip("state", f"{state} does not exist yet", "`join` makes it")
    folder = DeviceState(state)
    try:
        folder.check_writable()
    except InputError as error:
        return Finding.fail(
            "state", str(error), "change its owner to the user that runs the agent: chown"
        )
    # The key is the identity of the device: who reads it can take part as this device.
    if folder.key.exists() and folder.key.stat().st_mode & 0o077:
        return Finding.fail(
            "state", f"other users can read {folder.key}", f"chmod 600 {folder.key}"
        )
    return Finding.ok("state", f"{state} is writable")


def _disk(state: Path) -> Finding:
    here = _nearest(state)
    free = shutil.disk_usage(here).free
    detail = f"{format_bytes(free)} free for {state}"
    if free < LEAST_DISK:
        return Finding.fail(
            "disk", detail, f"free {format_bytes(LEAST_DISK)}, or give another folder with --state"
        )
    return Finding.ok("disk", detail)


def _nearest(place: Path) -> Path:
    """`place`, or the nearest folder above it that exists."""
    return next(found for found in (place, *place.absolute().parents) if found.exists())


def _onnx() -> Finding:
    # In a child process: a build for another processor crashes the process instead of raising.
    code, said = _python(RUN_TINY, TINY_GRAPH)
    if code == 0 and said.endswith(" 2.0"):
        found, form, _ = said.split()
        return Finding.ok("onnxruntime", f"{found} runs graphs; form of convolutions: {form}")
    return Finding.fail(
        "onnxruntime",
        f"running a graph ended with exit code {code}: {said or 'no output'}",
        "reinstall it: pip install --force-reinstall onnxruntime",
    )


def _optional(check: str, package: str, loading: str, use: str) -> Finding:
    """Whether the program `loading` loads a runtime that only `use` needs."""
    try:
        found = version(package)
    except PackageNotFoundError:
        return Finding.skip(check, f"{package} is not installed; only {use}")
    code, said = _python(loading)
    if code:
        return Finding.fail(
            check,
            f"loading {package} {found} ended with exit code {code}: {said}",
            f"reinstall it: pip install --force-reinstall {package}",
        )
    return Finding.ok(check, f"{found} loads")


def _python(code: str, given: bytes = b"") -> tuple[int, str]:
    """Run a Python program. Returns its exit code and the last line of its output."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], input=given, capture_output=True, timeout=LOADING_S
        )
    except subprocess.TimeoutExpired:
        return 124, f"not finished within {LOADING_S:.0f} s"
    said = (done.stdout + done.stderr).decode(errors="replace").strip().splitlines()
    return done.returncode, said[-1] if said else ""


def _memory() -> Finding:
    limits = ceilings()
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if not limits:
        least, detail = total, f"no limit below the machine's {format_bytes(total)}"
    else:
        tightest = min(limits, key=lambda ceiling: ceiling.limit)
        least, detail = tightest.limit, f"{tightest.name} is {format_bytes(tightest.limit)}"
    if least < LEAST_MEMORY:
        return Finding.fail("memory", detail, f"allow {format_bytes(LEAST_MEMORY)} at least")
    return Finding.ok("memory", detail)


def _temperature() -> Finding:
    degrees = sensors.temperature_c()
    if degrees is None:
        detail = "no sensor in /sys/class/thermal; --max-temperature cannot be used"
        return Finding.skip("temperature", detail)
    return Finding.ok("temperature", f"{degrees:.1f} °C")


def _power() -> Finding:
    charging = sensors.charging()
    if charging is None:
        detail = "no battery found; --only-when-charging never pauses"
        return Finding.skip("power", detail)
    return Finding.ok("power", "on external power" if charging else "on battery")
