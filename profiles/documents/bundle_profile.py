"""The profile document: what one bundle costs on one machine, in named units.

A figure that could not be measured is None and prints as "not measurable", never as 0.
"""

import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from profiles.errors import InputError

PROFILE_VERSION = 2
PROC = Path("/proc")

RUNS = 20
"""Counted runs of each phase, unless more are asked for."""
WARM_UP = 3
"""Runs that are not counted; the first of them is reported by itself."""
MOST = 1000
"""Phases of a profile, or stretches of a sustained run."""
UNSTABLE_SPREAD = 0.26
"""pyperf's limit, a standard deviation of a tenth of the mean, in terms of p90 - p10."""

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Whole = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Bytes = Whole
Count = Annotated[int, msgspec.Meta(ge=1, lt=2**53)]
Celsius = Annotated[float, msgspec.Meta(ge=-300, le=1000)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
CONTROLS = r"\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069"
"""Characters that end a line, or tell a terminal or a reader of Hebrew to do something."""
Text = Annotated[str, msgspec.Meta(max_length=500, pattern=f"^[^{CONTROLS}]*$")]
Role = Literal["stage", "initialise", "forward", "step", "train", "evaluate"]


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Immutable record; unknown fields are refused so that a typo never passes silently."""


class Machine(Struct, frozen=True, kw_only=True):
    """Where a measurement was taken. Measurements from unlike machines are never merged."""

    system: Text
    architecture: Text
    processor: Text | None
    cpu_count: Count
    memory_bytes: Bytes | None
    python: Text
    runtime: Text
    model: Text | None = None


class Duration(Struct, frozen=True, kw_only=True):
    """Spread of one signature's run time over `runs` counted runs, in seconds."""

    median_s: Seconds
    p10_s: Seconds
    p90_s: Seconds
    runs: Count

    def __post_init__(self) -> None:
        if not self.p10_s <= self.median_s <= self.p90_s:
            raise ValueError("p10_s, median_s and p90_s must not descend")

    @property
    def spread(self) -> float:
        """Width from p10 to p90 as a share of the median."""
        return (self.p90_s - self.p10_s) / self.median_s if self.median_s else 0.0


class Pages(Struct, frozen=True, kw_only=True):
    """Resident memory of a process, bytes: its own pages, and those that files stand behind."""

    anonymous_bytes: Bytes
    file_bytes: Bytes


class Memory(Struct, frozen=True, kw_only=True):
    """Memory of the process that ran one phase, bytes.

    `idle`: Python, runtime and agent loaded, no bundle opened. `peak_bytes`: highest resident set
    from there to the end (VmHWM, reset beforehand). `held`: after the last run, sessions open.
    """

    idle: Pages | None
    peak_bytes: Bytes | None
    held: Pages | None

    @property
    def idle_bytes(self) -> int | None:
        """Resident set of the idle process."""
        return None if self.idle is None else self.idle.anonymous_bytes + self.idle.file_bytes

    @property
    def above_idle_bytes(self) -> int | None:
        """What the phase added to the idle process at its peak."""
        if self.peak_bytes is None or self.idle_bytes is None:
            return None
        return max(self.peak_bytes - self.idle_bytes, 0)


class Phase(Struct, frozen=True, kw_only=True):
    """What one batch of one part of the schedule costs, measured in a process of its own.

    Roles: `stage` records activations (EmbracingFL's multi-step forward pass), `initialise` fills
    personal tensors once, `forward` predicts with the part that is trained, `step` is one run of
    one of several training signatures, `train` is all that the training does for one batch,
    `evaluate` judges one batch. `name` is the signature; of several, all of them.

    `cold_start_s` is process start to sessions ready, `first_s` the first run, `steady` the runs
    after the warm-up. `predicted_bytes` is what the manifest predicts for `above_idle_bytes`.
    """

    name: Text
    role: Role
    steady: Duration
    first_s: Seconds
    cold_start_s: Seconds | None = None
    memory: Memory | None = None
    predicted_bytes: Bytes | None = None


class Point(Struct, frozen=True, kw_only=True):
    """The training steps of one stretch of a sustained run, `at_s` seconds after its start."""

    at_s: Seconds
    step: Duration
    temperature_c: Celsius | None
    clock_hz: Whole | None


class Sustained(Struct, frozen=True, kw_only=True):
    """Training steps without a pause for `duration_s` seconds: what heat does to their time.

    `first` and `last` are the steps within `window_s` of the start and of the end: a minute, or
    half of a run that is shorter than two.
    """

    duration_s: Seconds
    window_s: Seconds
    first: Duration
    last: Duration
    points: Annotated[tuple[Point, ...], msgspec.Meta(min_length=1, max_length=MOST)]

    @property
    def slowdown(self) -> float:
        """How much longer the median step takes at the end, as a share: 0.1 is 10% longer."""
        return self.last.median_s / self.first.median_s - 1 if self.first.median_s else 0.0


class Conditions(Struct, frozen=True, kw_only=True):
    """Heat, clock and power at one moment. None: the machine does not report it.

    `throttled` says what slows the processor down now, `battery` is a share from 0 to 1.
    """

    temperature_c: Celsius | None = None
    governor: Text | None = None
    clock_hz: Whole | None = None
    throttled: tuple[Text, ...] | None = None
    battery: Share | None = None
    charging: bool | None = None


class Method(Struct, frozen=True, kw_only=True):
    """How the figures were taken.

    `source`: each phase in a process of its own (`profile`), or along with a round's training
    (`training`). `runs` counted after `warm_up_runs`; `threads` 0 is one for each core; `arena` is
    how the runtime was set to keep memory.
    """

    source: Literal["profile", "training"]
    clock: Text
    warm_up_runs: Whole
    runs: Count
    threads: Whole
    arena: Text


class Validity(Struct, frozen=True, kw_only=True):
    """Whether to believe the figures: `invalid` says why not, `unstable` names phases that vary.

    A phase varies where p10 to p90 is wider than UNSTABLE_SPREAD of its median.
    """

    invalid: tuple[Text, ...] = ()
    unstable: tuple[Text, ...] = ()


class Profile(Struct, frozen=True, kw_only=True):
    """Time and memory of one bundle on one machine.

    `structure` is the SHA-256 of the bundle's signatures and tensor table: the same in every round
    of one submodel, another for another model. `measured_at` is in UTC, ISO 8601.
    """

    version: int = PROFILE_VERSION
    submodel: Text
    structure: Text
    machine: Machine
    versions: dict[Text, Text]
    method: Method
    measured_at: Text
    batch_size: Count
    phases: Annotated[tuple[Phase, ...], msgspec.Meta(max_length=MOST)]
    before: Conditions
    after: Conditions
    validity: Validity
    sustained: Sustained | None = None

    def of_role(self, role: Role) -> tuple[Phase, ...]:
        """The phases that play `role`, in the schedule's order."""
        return tuple(phase for phase in self.phases if phase.role == role)

    @property
    def train(self) -> Duration:
        """Time of all that the training does for one batch."""
        return self._only("train")

    @property
    def forward(self) -> Duration:
        """Time of one batch through the trained part."""
        return self._only("forward")

    @property
    def backprop_s(self) -> float:
        """Median training time of a batch minus the median forward pass, in seconds."""
        return self.train.median_s - self.forward.median_s

    @property
    def decisive(self) -> Phase | None:
        """The phase with the highest process peak among those that training goes through."""
        known = [p for p in self.phases if p.role not in ("forward", "evaluate") and _peak(p)]
        return max(known, key=_peak, default=None)

    @property
    def peak_bytes(self) -> int | None:
        """Process peak of the training: Python and runtime with it."""
        return None if self.decisive is None else _peak(self.decisive)

    def _only(self, role: Role) -> Duration:
        found = self.of_role(role)
        if not found:
            raise InputError(
                f"The profile of {self.submodel} holds no {role!r} phase: measure the bundle with "
                "`edgetailor-agent profile`."
            )
        return found[0].steady


def _peak(phase: Phase) -> int:
    return (phase.memory and phase.memory.peak_bytes) or 0


def unstable(phases: Iterable[Phase]) -> tuple[str, ...]:
    """Names of the phases whose times vary too much to be relied on."""
    return tuple(phase.name for phase in phases if phase.steady.spread > UNSTABLE_SPREAD)


def this_machine(runtime: str) -> Machine:
    """Describe the machine that this process runs on; `runtime` names library and version."""
    memory = None
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        architecture=platform.machine(),
        processor=_processor() or platform.processor() or None,
        cpu_count=os.cpu_count() or 1,
        memory_bytes=memory,
        python=platform.python_version(),
        runtime=runtime,
        model=_first_line(PROC / "device-tree" / "model"),
    )


def _processor() -> str | None:
    """The processor's name as Linux gives it; ARM kernels give none, but a model of the board."""
    text = _read(PROC / "cpuinfo")
    names = [line.partition(":")[2] for line in text.splitlines() if line.startswith("model name")]
    return names[0].strip() if names else None


def _first_line(path: Path) -> str | None:
    return _read(path).partition("\n")[0].strip() or None


def _read(path: Path) -> str:
    """The file's text without what no profile may hold; empty where it cannot be read."""
    try:
        return re.sub(f"(?!\\n)[{CONTROLS}]", " ", path.read_text(errors="replace"))
    except OSError:
        return ""
