"""Messages between the profiler and its child processes, and the list of their tasks."""

import msgspec

from device_agent.formats.bundle import Bundle, training_of
from device_agent.formats.manifest import EVALUATE, PREDICT, Initialise, Record
from profiles.documents.bundle_profile import Memory, Role


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """The task of one child process: measure all runs of `signatures` for one batch.

    Attributes:
        role: The role of these signatures in a round.
        signatures: Names of the signatures, which run together.
    """

    role: Role
    signatures: tuple[str, ...]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The request that a child process gets on its command line.

    Attributes:
        folder: The bundle.
        task: What to measure.
        threads: Threads of the runtime; 0 for one per core.
        runs: Number of counted runs. The child answers with a Measurement.
        sustained_s: If it is above 0, the child runs the task for this many seconds instead of
            counted runs, and answers with a Sustained.
        sysfs: Folder with the device's sensors.
        started_s: The time by `time.monotonic` at which the parent started the child.
    """

    folder: str
    task: Task
    threads: int
    runs: int
    sustained_s: float
    sysfs: str
    started_s: float


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """Time and memory of a task.

    Attributes:
        cold_start_s: Time in seconds from the start of the process until its sessions were open.
        first_s: Duration of the first run in seconds.
        seconds: Duration of each counted run in seconds.
        memory: Memory of the process.
    """

    cold_start_s: float
    first_s: float
    seconds: list[float]
    memory: Memory


def tasks(bundle: Bundle) -> list[Task]:
    """List the tasks for everything that a round runs for a batch, in the order of the round.

    Args:
        bundle: The bundle to profile.

    Returns:
        The tasks. If a training step consists of several runs, there is also a task for each of its
        signatures.
    """
    listed = [
        Task(
            role="stage" if isinstance(step, Record) else "initialise", signatures=(step.signature,)
        )
        for step in bundle.manifest.schedule
        if isinstance(step, (Record, Initialise))
    ]
    listed.append(Task(role="forward", signatures=(PREDICT,)))
    steps = training_of(bundle).steps
    together = tuple(dict.fromkeys(step.signature for step in steps))
    if sum(step.times for step in steps) > 1:
        listed += [Task(role="step", signatures=(name,)) for name in together]
    listed.append(Task(role="train", signatures=together))
    if EVALUATE in bundle.manifest.signatures:
        listed.append(Task(role="evaluate", signatures=(EVALUATE,)))
    return listed
