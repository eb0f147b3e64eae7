"""How much memory this process may use, and whether a bundle's training fits into it."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from device_agent.formats.manifest import Manifest
from device_agent.system.process_memory import status_field
from device_agent.training.memory_estimate import session_bytes, training_bytes
from profiles.cost_model.memory_rule import (
    RUNTIME_CODE_BYTES,
    START_VARIATION_BYTES,
    TRAINING_RESERVE_BYTES,
)
from profiles.errors import DoesNotFitError, LimitError
from profiles.text_formatting import bytes_as_option

OPTION = "--max-memory"
SPACE = "the limit of the address space (ulimit -v)"
DATA = "the limit of data (ulimit -d)"
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")
STACK_BYTES = 8 << 20
"""Address space that Linux sets aside for each thread; next to none of it is ever used."""
LEAST = {resource.RLIMIT_AS: 170 * 10**6, resource.RLIMIT_DATA: 80 * 10**6}
"""What the agent takes of each before it trains anything, as measured on x86-64 with one thread."""


@dataclass(frozen=True)
class Usage:
    """What a process takes of what can be limited, in bytes; 0 where the system does not say.

    `resident` memory, address `space`, and `data` of its own.
    """

    resident: int
    space: int
    data: int

    @classmethod
    def now(cls) -> "Usage":
        """This process's."""
        return cls(*(status_field(name) or 0 for name in ("VmRSS", "VmSize", "VmData")))


@dataclass(frozen=True)
class Ceiling:
    """A limit, by its name, and how much of it this process uses now; bytes."""

    name: str
    limit: int
    used: int

    @property
    def left(self) -> int:
        """Bytes until the limit."""
        return self.limit - self.used


def ceilings(max_memory: int | None = None, idle: Usage | None = None) -> list[Ceiling]:
    """All limits that this process is under; `max_memory` is its owner's, in bytes.

    `idle` is what it takes before any training (default: what it takes now). One that has trained
    keeps the runtime's code and memory for the next time, which is not to be counted twice.
    """
    idle = idle or Usage.now()
    found = [
        (OPTION, max_memory, idle.resident),
        ("the control group (memory.max)", cgroup_limit(), idle.resident),
        (SPACE, _soft(resource.RLIMIT_AS), idle.space),
        (DATA, _soft(resource.RLIMIT_DATA), idle.data),
    ]
    return [Ceiling(name, limit, used) for name, limit, used in found if limit is not None]


def check_memory() -> None:
    """Raise LimitError under a limit of this process too low for the agent with its runtime.

    Their libraries would end the process without a word that helps.
    """
    for kind, name in ((resource.RLIMIT_AS, SPACE), (resource.RLIMIT_DATA, DATA)):
        limit = _soft(kind)
        if limit is not None and limit < LEAST[kind]:
            raise LimitError(
                f"The agent with its runtime takes {bytes_as_option(LEAST[kind])} before it trains "
                f"anything, and {name} allows {bytes_as_option(limit)}. Allow more than that."
            )


def _soft(kind: int) -> int | None:
    limit, _ = resource.getrlimit(kind)
    return None if limit == resource.RLIM_INFINITY else limit


def cgroup_limit(own: Path = OWN_CGROUP, root: Path = CGROUPS) -> int | None:
    """The lowest memory limit of this process's control groups, version 1 or 2; None without."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        here = top / path.strip("/")
        for folder in (here, *here.parents):
            if folder.is_relative_to(top):
                found.append(_number(folder / name))
    return min((limit for limit in found if limit is not None), default=None)


def _number(path: Path) -> int | None:
    """The limit in `path`; None for "max", for version 1's 2^63 and where there is no such file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() and int(text) < 1 << 62 else None


def check_idle(limits: list[Ceiling]) -> None:
    """Raise LimitError where one of `limits` is below what this process takes already."""
    for ceiling in limits:
        if ceiling.left <= 0:
            raise LimitError(
                f"{ceiling.name} allows {bytes_as_option(ceiling.limit)}, and the agent takes "
                f"{bytes_as_option(ceiling.used)} before any training: allow more than that."
            )


def needed_bytes(manifest: Manifest, validating: bool) -> tuple[int, str] | None:
    """Predicted growth of the process at its peak, in bytes, and the signatures that run then.

    None where the bundle does not say it for each of them.
    """
    found = training_bytes(manifest, validating)
    return found and (found[0] + TRAINING_RESERVE_BYTES, found[1])


def check_fits(manifest: Manifest, validating: bool, limits: list[Ceiling]) -> None:
    """Raise DoesNotFitError where training is predicted to go over one of `limits`."""
    need = needed_bytes(manifest, validating)
    if need is None or not limits:
        return
    peak, running = need
    tightest = min(limits, key=lambda ceiling: ceiling.left)
    if peak <= tightest.left:
        return
    used, allowed = bytes_as_option(tightest.used), bytes_as_option(tightest.limit)
    if tightest.left <= 0:
        why = f"the idle agent alone takes {used}, and {tightest.name} allows {allowed}"
    else:
        why = (
            f"running {running} takes {bytes_as_option(peak)} on top of the {used} of the idle "
            f"agent, and {tightest.name} allows {allowed}"
        )
    # Of what is left a submodel gets what the training itself does not take.
    fitting = tightest.left - TRAINING_RESERVE_BYTES
    most = bytes_as_option(fitting, round_down=True)
    smaller = (
        f", or take a submodel whose peak memory is {most} at most"
        if fitting > session_bytes(manifest)
        else ""
    )
    raise DoesNotFitError(
        f"{manifest.submodel} does not fit: {why}. Allow at least "
        f"{bytes_as_option(peak + tightest.used + START_VARIATION_BYTES)}{smaller}."
    )


def spare_bytes(manifest: Manifest, validating: bool, limits: list[Ceiling]) -> int:
    """Memory that training leaves for other things; none where its need is not known."""
    need = needed_bytes(manifest, validating)
    if need is None:
        return 0
    left = min((ceiling.left for ceiling in limits), default=_available() // 2)
    return max(0, left - need[0])


def _available() -> int:
    """Memory that the machine could give without swapping; 0 where it does not say."""
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return 0
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:")), 0)


@contextmanager
def enforce_memory_limit(
    max_memory: int | None, threads: int, sessions: int, idle: Usage
) -> Iterator[None]:
    """Let the kernel refuse memory beyond `max_memory` bytes meanwhile, as a MemoryError.

    It limits the process's own data (RLIMIT_DATA), which works without control groups. What is
    mapped, local data among it, does not count; `threads` are each of the runtime's `sessions`',
    and `idle` see `ceilings`.
    """
    if max_memory is None or not (idle.data and idle.resident):
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    stacks = STACK_BYTES * ((threads or os.cpu_count() or 1) - 1) * sessions
    limit = idle.data + max(0, max_memory - idle.resident - RUNTIME_CODE_BYTES) + stacks
    known = [value for value in (soft, hard) if value != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([limit, *known]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
