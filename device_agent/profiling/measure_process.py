"""Child process of the profiler. Its only argument is a Request as JSON."""

import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np

from device_agent.data.local_data import LocalData
from device_agent.formats.bundle import Bundle, open_bundle, training_of
from device_agent.formats.label_rule import label_rule
from device_agent.formats.manifest import SAFE_LIMIT, SAMPLES, Record
from device_agent.profiling.measure_messages import Measurement, Request, Task
from device_agent.profiling.sustained_run import Action, seconds_of, sustain
from device_agent.system import process_memory
from device_agent.training.runtime_option import with_runtime
from device_agent.training.schedule_interpreter import ScheduleRun
from device_agent.training.training_options import TrainingOptions
from profiles.documents.bundle_profile import WARM_UP, Memory, Sustained
from profiles.errors import EdgeTailorError


def synthetic(bundle: Bundle, samples: int) -> LocalData:
    """Create random data that fit a bundle.

    Args:
        bundle: The bundle.
        samples: Number of samples.

    Returns:
        Random samples and labels.
    """
    generator = np.random.default_rng(0)
    about = bundle.manifest
    shape = (samples, *about.sample_shape)
    labels = label_rule(about)
    label_shape = (samples, *(labels.shape or ()))
    return LocalData(
        x=generator.integers(about.sample_limit or SAFE_LIMIT, size=shape)
        if about.sample_dtype == "int64"
        else generator.standard_normal(shape, dtype=np.float32),
        y=generator.standard_normal(label_shape, dtype=np.float32)
        if labels.dtype == "float32"
        else generator.integers((labels.highest or 0) + 1, size=label_shape),
    )


def prepare_run(bundle: Bundle, task: Task, scratch: Path, threads: int) -> ScheduleRun:
    """Create a run with one batch of random data for `task`.

    Recorded activations and personal tensors are random too, so that no other signature has to run
    in the process before the measured one.
    """
    generator = np.random.default_rng(1)
    local = synthetic(bundle, training_of(bundle).batch_size)
    personal = {
        entry.name: (0.05 * generator.standard_normal(entry.shape)).astype(entry.dtype)
        for entry in bundle.manifest.tensors
        if entry.role == "personal"
    }
    run = ScheduleRun(bundle, local, scratch, TrainingOptions(threads=threads), personal)
    source = source_of(task, bundle)
    if source != SAMPLES:
        shape = (len(local), *run.recorded_shape(source))
        run.recordings[source] = recording = run.open_recording(source, 0)
        recording.append(generator.standard_normal(shape, dtype=np.float32))
        recording.close()
    return run


def make_action(task: Task, run: ScheduleRun) -> Action:
    """Open the sessions of `task`, and return a function that runs it for one batch."""
    if task.role in ("train", "step"):
        return make_training(task, run)
    (name,) = task.signatures
    signature, session = run.bundle.manifest.signatures[name], run.open(name)
    source = source_of(task, run.bundle)
    indices = np.arange(0 if task.role == "initialise" else len(run.local))
    return lambda: session.run(run.feeds(signature, source, indices, {}))


def make_training(task: Task, run: ScheduleRun) -> Action:
    """Open the sessions of a training task, and return a function that runs it for one batch.

    For the role `step` the function runs one signature once, otherwise all steps of a batch.
    """
    instruction = training_of(run.bundle)
    if task.role == "step":
        chosen = next(step for step in instruction.steps if step.signature in task.signatures)
        single = msgspec.structs.replace(chosen, times=1)
        instruction = msgspec.structs.replace(instruction, steps=(single,))
    # A rate of zero keeps the weights. After many steps on one batch, gradients would shrink to
    # denormal numbers, which slow a processor down.
    still = [
        msgspec.structs.replace(s, inputs=dict.fromkeys(s.inputs, 0.0)) for s in instruction.steps
    ]
    instruction = msgspec.structs.replace(instruction, steps=tuple(still))
    sessions = run.open_sessions(instruction)
    indices = np.arange(len(run.local))
    return lambda: run.train_batch(instruction, sessions, indices)


def source_of(task: Task, bundle: Bundle) -> str:
    """The data set that the schedule feeds to the task's signatures."""
    if task.role == "initialise":
        return SAMPLES
    for step in bundle.manifest.schedule:
        if isinstance(step, Record) and step.signature in task.signatures:
            return step.source
    return training_of(bundle).source


def measure(request: Request) -> Measurement | Sustained:
    """Measure in this process, which must have done nothing else before.

    Args:
        request: What to measure.

    Returns:
        A Sustained if the request asks for a sustained run, otherwise a Measurement.
    """
    process_memory.map_large_blocks()  # as a training does
    # A process starts with the peak of its parent, which must not count here.
    resettable = process_memory.reset_peak()
    idle = process_memory.pages()
    bundle = with_runtime(open_bundle(Path(request.folder)), request.runtime)
    with tempfile.TemporaryDirectory() as scratch:
        run = prepare_run(bundle, request.task, Path(scratch), request.threads)
        action = make_action(request.task, run)
        cold_start_s = time.monotonic() - request.started_s
        first_s, *_ = [seconds_of(action) for _ in range(WARM_UP)]
        if request.sustained_s:
            return sustain(action, request.sustained_s, Path(request.sysfs))
        seconds = [seconds_of(action) for _ in range(request.runs)]
        peak = process_memory.peak_bytes() if resettable else None
        found = Memory(idle=idle, peak_bytes=peak, held=process_memory.pages())
    return Measurement(cold_start_s=cold_start_s, first_s=first_s, seconds=seconds, memory=found)


if __name__ == "__main__":
    try:
        answer = measure(msgspec.json.decode(sys.argv[1], type=Request))
    except EdgeTailorError as error:
        sys.exit(str(error))
    sys.stdout.buffer.write(msgspec.json.encode(answer))
