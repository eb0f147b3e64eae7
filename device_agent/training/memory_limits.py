"""The memory limits of this process."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from device_agent.system.process_memory import status_field
from profiles.errors import LimitError
from profiles.text_formatting import bytes_as_option

OPTION = "--max-memory"
SPACE = "the limit of the address space (ulimit -v)"
DATA = "the limit of data (ulimit -d)"
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
STACK_BYTES = 8 << 20
"""Address space that Linux reserves for the stack of each thread. Almost none of it is used."""
AGENT_BYTES = {resource.RLIMIT_AS: 170 * 10**6, resource.RLIMIT_DATA: 80 * 10**6}
"""The agent's use of each resource before any training, measured on x86-64 with one thread."""
UNLIMITED_BYTES = 1 << 62
"""In control groups of version 1, a number close to 2^63 means that there is no limit."""


@dataclass(frozen=True)
class Usage:
    """A process's use of resources that can have a limit. 0 if the system does not report the use.

    Attributes:
        resident: Resident memory in bytes.
        space: Address space in bytes.
        data: Private data in bytes, such as the heap and anonymous mappings.
    """

    resident: int
    space: int
    data: int

    @classmethod
    def now(cls) -> "Usage":
        """The current usage of this process."""
        return cls(*(status_field(name) or 0 for name in ("VmRSS", "VmSize", "VmData")))


@dataclass(frozen=True)
class Ceiling:
    """A limit and its current usage.

    Attributes:
        name: Name of the limit for messages.
        limit: The limit in bytes.
        used: Bytes that the idle process uses.
    """

    name: str
    limit: int
    used: int

    @property
    def left(self) -> int:
        """Unused bytes; negative if the process is above the limit."""
        return self.limit - self.used


def ceilings(max_memory: int | None = None, idle: Usage | None = None) -> list[Ceiling]:
    """Find all memory limits of this process.

    Args:
        max_memory: The owner's limit in bytes, if any.
        idle: Usage of the process before its first training (default: the current usage). After a
            training, the process keeps the runtime's code and some memory. The next training uses
            this memory again, so it must not count twice.

    Returns:
        The limits.
    """
    idle = idle or Usage.now()
    limits = [
        (OPTION, max_memory, idle.resident),
        ("the control group (memory.max)", cgroup_limit(), idle.resident),
        (SPACE, _soft_limit(resource.RLIMIT_AS), idle.space),
        (DATA, _soft_limit(resource.RLIMIT_DATA), idle.data),
    ]
    return [Ceiling(name, limit, used) for name, limit, used in limits if limit is not None]


def check_memory() -> None:
    """Check that the agent can load its runtime within the limits of this process.

    Without this check, libraries would end the process without a helpful message.

    Raises:
        LimitError: A limit is too low for the agent.
    """
    for kind, name in ((resource.RLIMIT_AS, SPACE), (resource.RLIMIT_DATA, DATA)):
        limit = _soft_limit(kind)
        if limit is not None and limit < AGENT_BYTES[kind]:
            raise LimitError(
                "The agent with its runtime needs {needed} before any training, but {limit} "
                "allows only {allowed}. Raise this limit.",
                code="limit.below-agent",
                limit=name,
                limit_bytes=limit,
                needed_bytes=AGENT_BYTES[kind],
                needed=bytes_as_option(AGENT_BYTES[kind]),
                allowed=bytes_as_option(limit),
            )


def _soft_limit(kind: int) -> int | None:
    limit, _ = resource.getrlimit(kind)
    return None if limit == resource.RLIM_INFINITY else limit


def cgroup_limit(own: Path = OWN_CGROUP, root: Path = CGROUPS) -> int | None:
    """Find the lowest memory limit of this process's control groups (cgroups, version 1 or 2).

    Args:
        own: The file that lists the control groups of this process.
        root: The folder where the control groups are mounted.

    Returns:
        The limit in bytes; None if there is none.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        # Version 2 has one hierarchy. Its line names no controllers.
        if not controllers:
            top, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        # A group is also subject to the limits of all groups above it.
        group = top / path.strip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(top):
                limits.append(_read_limit(folder / name))
    return min((limit for limit in limits if limit is not None), default=None)


def _read_limit(path: Path) -> int | None:
    """Read the limit in `path`; None if there is no limit or no such file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() and int(text) < UNLIMITED_BYTES else None


def check_idle(limits: list[Ceiling]) -> None:
    """Check that the idle agent is below its limits.

    Args:
        limits: The limits that `ceilings` has found.

    Raises:
        LimitError: The idle agent already reaches a limit.
    """
    for ceiling in limits:
        if ceiling.left <= 0:
            raise LimitError(
                "The agent uses {needed} before any training, but {limit} allows only {allowed}. "
                "Raise this limit.",
                code="limit.below-agent",
                limit=ceiling.name,
                limit_bytes=ceiling.limit,
                needed_bytes=ceiling.used,
                needed=bytes_as_option(ceiling.used),
                allowed=bytes_as_option(ceiling.limit),
            )


@contextmanager
def enforce_memory_limit(
    max_memory: int | None, threads: int, sessions: int, idle: Usage, untouched: int
) -> Iterator[None]:
    """Limit the memory of this process. An allocation beyond the limit raises MemoryError.

    The kernel limits the process's private data (RLIMIT_DATA), which works without a control group.
    Memory-mapped files, for example local data, do not count.

    Args:
        max_memory: The limit in bytes; None for no limit.
        threads: Threads of each of the runtime's sessions; 0 for one per core.
        sessions: Number of sessions that are open at the same time.
        idle: Usage of the process before its first training, see `ceilings`.
        untouched: Bytes that the runtime requests but does not use. They are allowed in addition to
            the limit.
    """
    if max_memory is None or not (idle.data and idle.resident):
        yield
        return
    from profiles.cost_model.memory_rule import RUNTIME_CODE_BYTES

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    # RLIMIT_DATA counts the whole stack of every thread that a session starts. `max_memory` limits
    # resident memory, which contains almost nothing of these stacks. So they are added.
    stacks = STACK_BYTES * ((threads or os.cpu_count() or 1) - 1) * sessions
    allowed = max(0, max_memory - idle.resident - RUNTIME_CODE_BYTES)
    limit = idle.data + allowed + stacks + untouched
    known = [value for value in (soft, hard) if value != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([limit, *known]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
