"""Child process of the profiler: `python -m device_agent.measure BUNDLE forward|train THREADS`."""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from device_agent import memory
from device_agent.bundle import Bundle, open_bundle
from device_agent.data import LocalData
from device_agent.interpreter import ScheduleRun, quiet
from device_agent.manifest import SAFE_LIMIT, label_dtype, labels_of
from device_agent.profiler import RUNS, WARM_UP, Measurement, training_of


def synthetic(bundle: Bundle, samples: int) -> LocalData:
    """Random samples of the right shape and labels of the right kind."""
    order = np.random.default_rng(0)
    about = bundle.manifest
    shape = (samples, *about.sample_shape)
    regression = label_dtype(about) == "float32"
    return LocalData(
        x=order.integers(about.sample_limit or SAFE_LIMIT, size=shape)
        if about.sample_dtype == "int64"
        else order.standard_normal(shape, dtype=np.float32),
        y=order.standard_normal((samples, about.classes), dtype=np.float32)
        if regression
        else order.integers(labels_of(about.classes), size=samples),
    )


def forward_pass(run: ScheduleRun) -> Callable[[], object]:
    """One prediction of the trained part for one batch."""
    source = training_of(run.bundle).source
    signature = run.bundle.manifest.signatures["predict"]
    session = run.open("predict")
    feeds = run.feeds(signature, source, np.arange(len(run.local)), {})
    return lambda: session.run(feeds)


def training_step(run: ScheduleRun) -> Callable[[], object]:
    """All that the schedule does for one batch."""
    instruction = training_of(run.bundle)
    sessions = run.sessions(instruction)
    indices = np.arange(len(run.local))
    return lambda: run.one_batch(instruction, sessions, indices)


def timed(action: Callable[[], object]) -> list[float]:
    """Seconds of each counted run of `action`, warm-up apart."""
    for _ in range(WARM_UP):
        action()
    seconds = []
    for _ in range(RUNS):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return seconds


def measure(folder: Path, what: str, threads: int) -> Measurement:
    """Measure one thing in this process, which must be a fresh one."""
    resettable = memory.reset_peak()
    idle = memory.resident_bytes()
    bundle = open_bundle(folder)
    local = synthetic(bundle, training_of(bundle).batch_size)
    with tempfile.TemporaryDirectory() as scratch:
        run = ScheduleRun(bundle, local, Path(scratch), threads, 0, {}, quiet)
        run.prepare()
        action = forward_pass(run) if what == "forward" else training_step(run)
        seconds = timed(action)
    return Measurement(
        seconds=seconds,
        idle_bytes=idle,
        peak_bytes=memory.peak_bytes() if resettable else None,
    )


if __name__ == "__main__":
    found = measure(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    sys.stdout.buffer.write(msgspec.json.encode(found))
