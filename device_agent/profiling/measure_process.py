"""Child process of the profiler, started with `-m` and a request as JSON."""

import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from device_agent.formats.bundle import Bundle, open_bundle, training_of
from device_agent.formats.manifest import SAFE_LIMIT, SAMPLES, Record, label_dtype, labels_of
from device_agent.profiling.measure_messages import Measurement, Request, Task
from device_agent.system import process_memory, sensors
from device_agent.training.local_data import LocalData
from device_agent.training.schedule_interpreter import ScheduleRun
from device_agent.training.training_options import TrainingOptions
from profiles.documents.bundle_profile import WARM_UP, Memory, Point, Sustained
from profiles.documents.timing_statistics import duration
from profiles.errors import EdgeTailorError

Action = Callable[[], object]
POINTS = 60
"""Stretches that a sustained run is reported in, of a second or more each."""
MINUTE_S = 60.0


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


def ready_run(bundle: Bundle, task: Task, scratch: Path, threads: int) -> ScheduleRun:
    """A run of one batch; recording and personal tensors hold random numbers.

    No other signature has to run for the one that is measured.
    """
    order = np.random.default_rng(1)
    local = synthetic(bundle, training_of(bundle).batch_size)
    personal = {
        entry.name: (0.05 * order.standard_normal(entry.shape)).astype(entry.dtype)
        for entry in bundle.manifest.tensors
        if entry.role == "personal"
    }
    run = ScheduleRun(bundle, local, scratch, TrainingOptions(threads=threads), personal)
    source = source_of(task, bundle)
    if source != SAMPLES:
        shape = (len(local), *recorded_shape(bundle, source))
        run.recordings[source] = recording = run.recording(source, 0)
        recording.append(order.standard_normal(shape, dtype=np.float32))
        recording.close()
    return run


def recorded_shape(bundle: Bundle, source: str) -> tuple[int, ...]:
    """Shape of one sample of the recording `source`."""
    steps = (step for step in bundle.manifest.schedule if isinstance(step, Record))
    signature = next(step.signature for step in steps if step.target == source)
    (output,) = bundle.manifest.signatures[signature].outputs
    return tuple(size for size in output.shape if size is not None)


def action_of(task: Task, run: ScheduleRun) -> Action:
    """What `task` does for one batch, its sessions open."""
    if task.role in ("train", "step"):
        return training(task, run)
    (name,) = task.signatures
    signature, session = run.bundle.manifest.signatures[name], run.open(name)
    source = source_of(task, run.bundle)
    indices = np.arange(0 if task.role == "initialise" else len(run.local))
    return lambda: session.run(run.feeds(signature, source, indices, {}))


def training(task: Task, run: ScheduleRun) -> Action:
    """All steps of a batch, or for the role `step` one run of one of them.

    Each begins at the first state: trained on one batch for long, gradients fade to numbers below
    the normal ones, with which a processor is slower.
    """
    instruction = training_of(run.bundle)
    if task.role == "step":
        chosen = next(step for step in instruction.steps if step.signature in task.signatures)
        single = msgspec.structs.replace(chosen, times=1)
        instruction = msgspec.structs.replace(instruction, steps=(single,))
    sessions = run.sessions(instruction)
    first, indices = dict(run.state), np.arange(len(run.local))

    def action() -> None:
        run.state = dict(first)
        run.one_batch(instruction, sessions, indices)

    return action


def source_of(task: Task, bundle: Bundle) -> str:
    """The data set that the schedule gives to the task's signature."""
    if task.role == "initialise":
        return SAMPLES
    for step in bundle.manifest.schedule:
        if isinstance(step, Record) and step.signature in task.signatures:
            return step.source
    return training_of(bundle).source


def seconds_of(action: Action) -> float:
    """How long one run of `action` takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure(request: Request) -> Measurement | Sustained:
    """Do what `request` asks in this process, which must be a fresh one."""
    process_memory.map_large_blocks()
    resettable = process_memory.reset_peak()
    idle = process_memory.pages()
    bundle = open_bundle(Path(request.folder))
    with tempfile.TemporaryDirectory() as scratch:
        run = ready_run(bundle, request.task, Path(scratch), request.threads)
        action = action_of(request.task, run)
        cold_start_s = time.monotonic() - request.started_s
        first_s, *_ = [seconds_of(action) for _ in range(WARM_UP)]
        if request.sustained_s:
            return sustain(action, request.sustained_s, Path(request.sysfs))
        seconds = [seconds_of(action) for _ in range(request.runs)]
        peak = process_memory.peak_bytes() if resettable else None
        found = Memory(idle=idle, peak_bytes=peak, held=process_memory.pages())
    return Measurement(cold_start_s=cold_start_s, first_s=first_s, seconds=seconds, memory=found)


def sustain(action: Action, lasting_s: float, sysfs: Path) -> Sustained:
    """Run `action` again and again for `lasting_s` seconds, twice at least."""
    at, took = array("d"), array("d")
    stretch = max(lasting_s / POINTS, 1.0)
    read: dict[int, tuple[float | None, int | None]] = {}
    start = time.perf_counter()
    while (begun := time.perf_counter() - start) < lasting_s or len(took) < 2:
        took.append(seconds_of(action))
        at.append(begun)
        if int(begun // stretch) not in read:
            heat = sensors.temperature_c(sysfs), sensors.clock_hz(sysfs)
            read[int(begun // stretch)] = heat
    return course(np.asarray(at), np.asarray(took), stretch, read)


def course(
    at: np.ndarray,
    took: np.ndarray,
    stretch: float,
    read: dict[int, tuple[float | None, int | None]],
) -> Sustained:
    """The course of steps that began `at` seconds after the start and `took` so many.

    `read` is temperature and clock by stretch, for every stretch that a step began in.
    """
    lasted = float(at[-1] + took[-1])
    window = min(MINUTE_S, lasted / 2)
    late = at + took > lasted - window
    return Sustained(
        duration_s=lasted,
        window_s=window,
        first=duration(took[at < window]),
        last=duration(took[late]),
        points=tuple(
            Point(
                at_s=number * stretch,
                step=duration(took[at // stretch == number]),
                temperature_c=temperature,
                clock_hz=clock,
            )
            for number, (temperature, clock) in read.items()
        ),
    )


if __name__ == "__main__":
    try:
        answer = measure(msgspec.json.decode(sys.argv[1], type=Request))
    except EdgeTailorError as error:
        sys.exit(str(error))
    sys.stdout.buffer.write(msgspec.json.encode(answer))
