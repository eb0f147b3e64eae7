"""Child process of the profiler. Its only argument is a Request as JSON."""

import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np

from device_agent.formats.bundle import Bundle, open_bundle, training_of
from device_agent.formats.manifest import SAMPLES, Record
from device_agent.profiling.measure_messages import Measurement, Request, Task
from device_agent.profiling.sustained_run import Action, seconds_of, sustain
from device_agent.system import process_memory
from device_agent.training.form_choice import in_device_form
from device_agent.training.random_run import random_run
from device_agent.training.schedule_interpreter import ScheduleRun
from profiles.documents.bundle_profile import WARM_UP, Memory, Sustained
from profiles.errors import EdgeTailorError


def prepare_run(bundle: Bundle, task: Task, scratch: Path, threads: int) -> ScheduleRun:
    """Create a run with one batch of random data for `task`, see `random_run`.

    With random data, the process does not need to run other signatures first.
    """
    source = source_of(task, bundle)
    return random_run(bundle, [] if source == SAMPLES else [source], scratch, threads)


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

    For the role `step` the function runs one signature once. For other roles it runs all steps of a
    batch.
    """
    instruction = training_of(run.bundle)
    if task.role == "step":
        chosen = next(step for step in instruction.steps if step.signature in task.signatures)
        single = msgspec.structs.replace(chosen, times=1)
        instruction = msgspec.structs.replace(instruction, steps=(single,))
    # A learning rate of zero keeps the weights. Otherwise, after many steps on one batch, gradients
    # would shrink to denormal numbers, which slow a processor down.
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
    """Measure the task in this process, which must not have done other work before.

    Args:
        request: What to measure.

    Returns:
        A Sustained if the request asks for a sustained run, otherwise a Measurement.
    """
    process_memory.map_large_blocks()  # as a training does
    # A process starts with the peak of its parent, which must not count here.
    resettable = process_memory.reset_peak()
    idle = process_memory.pages()
    bundle = in_device_form(open_bundle(Path(request.folder)))
    with tempfile.TemporaryDirectory() as scratch:
        run = prepare_run(bundle, request.task, Path(scratch), request.threads)
        action = make_action(request.task, run)
        cold_start_s = time.monotonic() - request.started_s
        first_s, *_ = [seconds_of(action) for _ in range(WARM_UP)]
        if request.sustained_s:
            return sustain(action, request.sustained_s, Path(request.sysfs))
        seconds = [seconds_of(action) for _ in range(request.runs)]
        peak = process_memory.peak_bytes() if resettable else None
        memory = Memory(idle=idle, peak_bytes=peak, held=process_memory.pages())
    return Measurement(cold_start_s=cold_start_s, first_s=first_s, seconds=seconds, memory=memory)


if __name__ == "__main__":
    try:
        answer = measure(msgspec.json.decode(sys.argv[1], type=Request))
    except EdgeTailorError as error:
        sys.exit(str(error))
    sys.stdout.buffer.write(msgspec.json.encode(answer))
