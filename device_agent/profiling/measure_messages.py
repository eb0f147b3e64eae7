"""What the profiler and its child processes say to each other, and what there is to measure."""

import msgspec

from device_agent.formats.bundle import Bundle, training_of
from device_agent.formats.manifest import EVALUATE, PREDICT, Initialise, Record
from profiles.documents.bundle_profile import Memory, Role


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What one child measures: the signatures that play `role`, together."""

    role: Role
    signatures: tuple[str, ...]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """All that a child is told; `started_s` is the moment by `time.monotonic`.

    It runs the task `runs` times and answers with a Measurement; where `sustained_s` is above 0,
    for so many seconds, and answers with a Sustained.
    """

    folder: str
    task: Task
    threads: int
    runs: int
    sustained_s: float
    sysfs: str
    started_s: float


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds until the sessions were open, of the first run, and of each counted run."""

    cold_start_s: float
    first_s: float
    seconds: list[float]
    memory: Memory


def tasks(bundle: Bundle) -> list[Task]:
    """All that the bundle's schedule does for a batch, in its order, and the evaluation."""
    found = [
        Task(
            role="stage" if isinstance(step, Record) else "initialise", signatures=(step.signature,)
        )
        for step in bundle.manifest.schedule
        if isinstance(step, (Record, Initialise))
    ]
    found.append(Task(role="forward", signatures=(PREDICT,)))
    steps = training_of(bundle).steps
    together = tuple(dict.fromkeys(step.signature for step in steps))
    if sum(step.times for step in steps) > 1:
        found += [Task(role="step", signatures=(name,)) for name in together]
    found.append(Task(role="train", signatures=together))
    if EVALUATE in bundle.manifest.signatures:
        found.append(Task(role="evaluate", signatures=(EVALUATE,)))
    return found
