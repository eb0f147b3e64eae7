"""Runs a bundle on one batch of random data, to measure a training or compare its first steps.

Time and memory do not depend on the values of samples, recorded activations or weights.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from device_agent.data.local_data import LocalData
from device_agent.formats.bundle import Bundle, training_of
from device_agent.formats.input_range import InputRange, draw_samples
from device_agent.formats.label_rule import label_rule
from device_agent.formats.manifest import (
    PREDICT,
    SAFE_LIMIT,
    SAMPLES,
    Initialise,
    Manifest,
    Part,
    Train,
)
from device_agent.formats.packing import pack, sample_parts
from device_agent.training.schedule_interpreter import ScheduleRun
from device_agent.training.training_options import TrainingOptions


def synthetic(bundle: Bundle, samples: int) -> LocalData:
    """Create random data that fit a bundle.

    Args:
        bundle: The bundle.
        samples: Number of samples.

    Returns:
        Random samples and labels.
    """
    generator = np.random.default_rng(0)
    about, labels = bundle.manifest, label_rule(bundle.manifest)
    x = Part(
        name="",
        shape=about.sample_shape,
        dtype=about.sample_dtype,
        limit=about.sample_limit or SAFE_LIMIT,
    )
    y = Part(name="", shape=labels.shape or (), dtype=labels.dtype, limit=(labels.highest or 0) + 1)
    given = range_of_source(about, SAMPLES)
    return LocalData(
        x=drawn(given, (samples, *x.shape), generator).astype(x.dtype)
        if given
        else _random(generator, samples, sample_parts(about), x),
        y=_random(generator, samples, labels.parts, y),
    )


def _random(
    generator: np.random.Generator, samples: int, parts: Sequence[Part], single: Part
) -> np.ndarray:
    """A random array for `single`, or for `parts` side by side."""
    if parts:
        arrays = {part.name: _random(generator, samples, (), part) for part in parts}
        return pack(arrays, parts)
    shape = (samples, *single.shape)
    if single.dtype == "int64":
        return generator.integers(single.limit or SAFE_LIMIT, size=shape)
    return generator.standard_normal(shape, dtype=np.float32)


def range_of_source(manifest: Manifest, source: str) -> InputRange:
    """The range of the numbers of the data set `source`; empty if they are standard normal."""
    readers = [
        step.signature
        for instruction in manifest.schedule
        if not isinstance(instruction, Initialise) and instruction.source == source
        for step in (instruction.steps if isinstance(instruction, Train) else (instruction,))
    ]
    for name in readers or [PREDICT]:
        for port in manifest.signatures[name].inputs:
            if port.kind == "samples" and port.range:
                return port.range
    return ()


def drawn(
    input_range: InputRange, shape: tuple[int, ...], generator: np.random.Generator
) -> np.ndarray:
    """Random numbers of `shape` in `input_range`; standard normal numbers for an empty range."""
    if not input_range:
        return generator.standard_normal(shape, dtype=np.float32)
    return draw_samples(input_range, shape, generator.random, generator.standard_normal)


def random_run(
    bundle: Bundle, recordings: Sequence[str], scratch: Path, threads: int
) -> ScheduleRun:
    """Create a run with one batch of random data.

    Recorded activations and personal tensors are also random. So any signature can run without the
    earlier signatures of the schedule.

    Args:
        bundle: The bundle.
        recordings: Names of the recordings that the signatures read. The random numbers depend only
            on the order of these names, so every process draws the same numbers.
        scratch: Folder for the recordings.
        threads: Threads of the runtime; 0 for one per core.

    Returns:
        The run. No session is open yet.
    """
    generator = np.random.default_rng(1)
    local = synthetic(bundle, training_of(bundle).batch_size)
    personal = {
        entry.name: (0.05 * generator.standard_normal(entry.shape)).astype(entry.dtype)
        for entry in bundle.manifest.tensors
        if entry.role == "personal"
    }
    options, noise = TrainingOptions(threads=threads), np.random.default_rng(2).bytes
    run = ScheduleRun(bundle, local, scratch, options, personal, random_bytes=noise)
    for name in recordings:
        run.recordings[name] = recording = run.open_recording(name, 0)
        shape = (len(local), *run.recorded_shape(name))
        given = range_of_source(bundle.manifest, name)
        recording.append(drawn(given, shape, generator).astype(np.float32))
        recording.close()
    return run


NUDGE = 1e-6
"""About the relative size of rounding errors. A change ten times as large flips ReLU masks in deep
nets."""


def nudge(tensors: Iterable[np.ndarray]) -> None:
    """Change each number in `tensors` slightly, by a random share of about NUDGE."""
    draw = np.random.default_rng(2)
    for tensor in tensors:
        if tensor.dtype == np.float32:
            tensor *= 1 + NUDGE * draw.standard_normal(tensor.shape, dtype=np.float32)
