"""A trial of a runtime: how long it takes for a bundle, and what its first steps compute.

A trial has a process of its own, so that neither the code nor the memory of a runtime that is not
chosen stays in the agent, and a crash ends the trial only. The process runs this module; its only
argument is a Request as JSON.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace

from device_agent.formats.bundle import open_bundle, training_of
from device_agent.formats.manifest import Record, Struct
from device_agent.system.child_processes import failure
from device_agent.system.process_memory import map_large_blocks
from device_agent.training.memory_estimate import open_at_once, untouched_bytes
from device_agent.training.memory_limits import Usage, enforce_memory_limit
from device_agent.training.random_run import nudge, random_run
from device_agent.training.runtime_option import with_runtime, without_forms
from profiles.errors import EdgeTailorError
from profiles.json_decoding import MalformedError, decode_json

Clock = Callable[[], float]
LOSSES = 3
"""The first training steps whose losses are kept."""
FEWEST, MOST = 4, 50
"""Timed runs of a stage or of the training step, after the first one."""
LENGTH_S = 3.0
"""After this time a stage or the training step gets no more than the fewest runs."""
PROJECTIONS = 4
"""Numbers that stand for the change of a tensor."""
CHUNK = 2**16
"""Numbers of a tensor that are projected at a time, so that this takes little memory."""
LONGEST_S = 300.0
"""A trial that takes longer is ended. The service's watchdog waits longer than that."""


class Request(Struct, frozen=True, kw_only=True):
    """What to try.

    Attributes:
        folder: The bundle.
        runtime: The library that runs its graphs, as in TrainingOptions.
        threads: Threads of the runtime; 0 for one per core.
        max_memory: Bytes of memory that the trial's process may use. None means no limit.
        nudged: Whether all weights differ a little, to see which changes roundings decide.
        plain: Whether the bundle's graphs run as they are, in no other form.
    """

    folder: str
    runtime: str
    threads: int
    max_memory: int | None = None
    nudged: bool = False
    plain: bool = False


class Trial(Struct, frozen=True, kw_only=True):
    """The result of a trial.

    Attributes:
        refused: Why the runtime cannot train the bundle; None if it can.
        start_s: Time in seconds to open all sessions, and of their first runs beyond a usual run,
            in which some runtimes compile the graph for the batch size.
        record_s: Time to record the activations of one batch through all frozen stages.
        train_s: Time of all training work for one batch.
        losses: Losses of the first training steps.
        changes: Projections of what the first training work changed, by tensor.
    """

    refused: str | None = None
    start_s: float = 0.0
    record_s: float = 0.0
    train_s: float = 0.0
    losses: tuple[float, ...] = ()
    changes: dict[str, list[float]] = msgspec.field(default_factory=dict)


def projected(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A few numbers for each tensor: sums of its numbers with signs drawn at random.

    The signs depend on the names alone. A change of the tensor changes each sum by a number of
    about the change's norm, so that wrong tensors are seen without keeping the right ones.
    """
    found = {}
    for place, name in enumerate(sorted(tensors)):
        flat, draw = tensors[name].reshape(-1), np.random.default_rng(place)
        sums = np.zeros(PROJECTIONS)
        for start in range(0, len(flat), CHUNK):
            part = flat[start : start + CHUNK].astype(np.float64)
            bits = draw.integers(256, size=(len(part), 1), dtype=np.uint8)
            signs = np.unpackbits(bits, axis=1, count=PROJECTIONS, bitorder="little")
            # Not by @: BLAS would take buffers of tens of megabytes for the life of the process.
            sums += np.einsum("n,nk->k", part, 1 - 2.0 * signs)
        found[name] = sums
    return found


def changed_since(
    before: Mapping[str, np.ndarray], tensors: Mapping[str, np.ndarray]
) -> dict[str, list[float]]:
    """The projections of what changed in `tensors` since they were projected to `before`."""
    after = projected(tensors)
    return {name: (after[name] - sums).tolist() for name, sums in before.items()}


def faster_of(one: Trial, other: Trial) -> Trial:
    """The shorter times of two trials of the same runtime."""
    return replace(
        one,
        start_s=min(one.start_s, other.start_s),
        record_s=min(one.record_s, other.record_s),
        train_s=min(one.train_s, other.train_s),
    )


def time_runs(open_: Callable[[], Callable[[], object]], clock: Clock) -> tuple[float, float]:
    """Time the start and the usual run of a piece of work.

    Args:
        open_: Opens the sessions and returns the function that runs the work once.
        clock: Returns the time in seconds.

    Returns:
        The time to open and for the first run beyond a usual run, and the shortest of the later
        runs: other programs only make a run longer.
    """
    begun = clock()
    work = open_()
    work()
    ready = clock()
    seconds: list[float] = []
    while len(seconds) < FEWEST or (len(seconds) < MOST and clock() - ready < LENGTH_S):
        start = clock()
        work()
        seconds.append(clock() - start)
    usual = min(seconds)
    return max(0.0, ready - begun - usual), usual


def try_runtime(request: Request, clock: Clock = time.perf_counter) -> Trial:
    """Try a runtime in this process.

    Args:
        request: What to try.
        clock: Returns the time in seconds.

    Returns:
        The trial, also if the runtime cannot load or run the bundle, or memory runs out.
    """
    try:
        return _measured(request, clock)
    except (EdgeTailorError, MemoryError) as error:
        return Trial(refused=str(error) or "memory ran out")


def _measured(request: Request, clock: Clock) -> Trial:
    map_large_blocks()  # as a training does
    idle = Usage.now()
    bundle = open_bundle(Path(request.folder))
    bundle = with_runtime(without_forms(bundle) if request.plain else bundle, request.runtime)
    stages = [one for one in bundle.manifest.schedule if isinstance(one, Record)]
    sessions = open_at_once(bundle.manifest)
    with (
        tempfile.TemporaryDirectory() as scratch,
        enforce_memory_limit(
            request.max_memory, request.threads, sessions, idle, untouched_bytes(bundle.manifest)
        ),
    ):
        recordings = [stage.target for stage in stages]
        run = random_run(bundle, recordings, Path(scratch), request.threads)
        whole, training = np.arange(len(run.local)), training_of(bundle)
        losses: list[float] = []
        changes: dict[str, list[float]] = {}

        def open_stage(stage: Record) -> Callable[[], object]:
            signature = bundle.manifest.signatures[stage.signature]
            session = run.open(stage.signature)
            return lambda: session.run(run.feeds(signature, stage.source, whole, {}))

        def open_training() -> Callable[[], object]:
            opened = run.open_sessions(training)
            if request.nudged:
                nudge(run.state.values())
            before = projected(run.state)

            def train() -> None:
                losses.extend(run.train_batch(training, opened, whole))
                if not changes:
                    changes.update(changed_since(before, run.state))

            return train

        start_s = record_s = 0.0
        for stage in stages:
            started, seconds = time_runs(partial(open_stage, stage), clock)
            start_s, record_s = start_s + started, record_s + seconds
            run.release()
        started, train_s = time_runs(open_training, clock)
    return Trial(
        start_s=start_s + started,
        record_s=record_s,
        train_s=train_s,
        losses=tuple(losses[:LOSSES]),
        changes=changes,
    )


def in_child(request: Request) -> Trial:
    """Try a runtime in a process of its own. If that crashes or hangs, the runtime is refused."""
    encoded = msgspec.json.encode(request).decode()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "device_agent.training.trials.runtime_trial", encoded],
            capture_output=True,
            timeout=LONGEST_S,
        )
    except subprocess.TimeoutExpired:
        return Trial(refused=f"its trial was not finished within {LONGEST_S:.0f} s")
    if done.returncode:
        return Trial(refused=failure(done.returncode, done.stderr))
    try:
        return decode_json(done.stdout, Trial)
    except MalformedError:
        # JSON has no number for a loss, a change or a time that is none.
        return Trial(refused="in its first steps it computes numbers that are not finite")


if __name__ == "__main__":
    tried = try_runtime(msgspec.json.decode(sys.argv[1], type=Request))
    sys.stdout.buffer.write(msgspec.json.encode(tried))
