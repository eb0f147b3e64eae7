"""Tests with tiny runs whether Winograd's method makes this ONNX Runtime faster.

The method needs fewer multiplications but more passes over memory. On some processors it is faster,
on others slower. The probe is a small training step of two layers. `exporters/runtime_probes.py`
writes this step, in plain and in Winograd form, to the folder `probes`.
"""

import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

from device_agent.formats.graph_forms import PLAIN, WINOGRAD, form_file
from device_agent.runtime.onnx_runtime import open_model
from device_agent.system.process_memory import release_unused
from profiles.cost_model.workload import WINOGRAD_GAIN

PROBE = Path(__file__).with_name("probes") / "convolutions.onnx"
SHAPES = {
    "x32": (2, 32, 16, 16),
    "w32": (32, 32, 3, 3),
    "x64": (2, 64, 8, 8),
    "w64": (64, 64, 3, 3),
}
"""The inputs of the probe: images and weights of two layers."""
CLOSE = 1e-4
RUNS = 5
"""Timed runs of each form, in turns. The shortest run counts: other work only makes runs longer."""


@cache
def multiplies_faster() -> bool:
    """Whether convolutions by Winograd's method are correct and faster. Measured only once."""
    faster = gains(PROBE)
    release_unused()  # memory that the sessions freed would count against a memory limit
    return faster


def gains(probe: Path, clock: Callable[[], float] = time.thread_time) -> bool:
    """Whether the Winograd form of the graph `probe` is correct, and faster than the plain form.

    The Winograd form must save at least the share WINOGRAD_GAIN of the time. If one of the forms
    cannot run, the answer is False.

    Args:
        probe: The file of the plain form. The file of the Winograd form is in the same folder.
        clock: Measures the time of a run, in seconds. The default clock counts processor time,
            which other programs hardly change. So a second call should give the same answer.
    """
    draw = np.random.default_rng(0)
    given = {name: draw.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    seconds: dict[str, list[float]] = {PLAIN: [], WINOGRAD: []}
    try:
        files = {PLAIN: probe, WINOGRAD: probe.with_name(form_file(probe.name, WINOGRAD))}
        sessions = {form: open_model(str(file), 1) for form, file in files.items()}
        results = {form: session.run(None, given) for form, session in sessions.items()}
        for _ in range(RUNS):
            for form, session in sessions.items():
                start = clock()
                session.run(None, given)
                seconds[form].append(clock() - start)
    except Exception:  # the exceptions of onnxruntime have no public base class
        return False
    right = all(
        float(np.abs(plain - other).max()) <= CLOSE * float(np.abs(plain).max())
        for plain, other in zip(results[PLAIN], results[WINOGRAD], strict=True)
    )
    return right and min(seconds[WINOGRAD]) < (1 - WINOGRAD_GAIN) * min(seconds[PLAIN])
