"""The profile document: time and memory of one bundle on one machine, in named units.

A figure that could not be measured is None and is printed as "not measurable", never as 0.
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
"""Default number of counted runs of each phase."""
WARM_UP = 3
"""Runs before the counted ones. The time of the first is reported separately."""
MOST = 1000
"""Limit for the phases of a profile and for the points of a sustained run."""
UNSTABLE_SPREAD = 0.26
"""Limit of (p90 - p10) / median, as in pyperf: a standard deviation of 10% of the mean."""

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Whole = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Bytes = Whole
Count = Annotated[int, msgspec.Meta(ge=1, lt=2**53)]
Celsius = Annotated[float, msgspec.Meta(ge=-300, le=1000)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
CONTROLS = r"\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069"
"""Line ends, terminal control characters and characters that change the text direction."""
Text = Annotated[str, msgspec.Meta(max_length=500, pattern=f"^[^{CONTROLS}]*$")]
Role = Literal["stage", "initialise", "forward", "step", "train", "evaluate"]


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Immutable record. Unknown fields are refused, so that a typo is never ignored."""


class Machine(Struct, frozen=True, kw_only=True):
    """The machine of a measurement. Measurements from different machines are never merged.

    If `kind` is `browser`, a web page made the measurement. A page runs no Python, and it does not
    know its processor or memory.
    """

    system: Text
    architecture: Text
    processor: Text | None
    cpu_count: Count
    memory_bytes: Bytes | None
    python: Text | None
    runtime: Text
    model: Text | None = None
    kind: Literal["native", "browser"] = "native"


class Duration(Struct, frozen=True, kw_only=True):
    """Median and spread of the run time over `runs` counted runs, in seconds."""

    median_s: Seconds
    p10_s: Seconds
    p90_s: Seconds
    runs: Count

    def __post_init__(self) -> None:
        if not self.p10_s <= self.median_s <= self.p90_s:
            raise ValueError("p10_s, median_s and p90_s must be in ascending order")

    @property
    def spread(self) -> float:
        """The spread of the times, relative to the median: (p90 - p10) / median."""
        return (self.p90_s - self.p10_s) / self.median_s if self.median_s else 0.0


class Pages(Struct, frozen=True, kw_only=True):
    """Resident memory of a process in bytes, as anonymous pages and pages of files."""

    anonymous_bytes: Bytes
    file_bytes: Bytes


class Memory(Struct, frozen=True, kw_only=True):
    """Memory of the process that ran one phase, in bytes.

    `idle`: measured after Python, the runtime and the agent are loaded, before a bundle is opened.
    `peak_bytes`: the process peak, which is the largest resident set from `idle` to the end. It is
    VmHWM, which is reset at `idle`. `held`: measured after the last run, before the sessions are
    closed.
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
        """The process peak above the idle process."""
        if self.peak_bytes is None or self.idle_bytes is None:
            return None
        return max(self.peak_bytes - self.idle_bytes, 0)


class Phase(Struct, frozen=True, kw_only=True):
    """Time and memory of one part of the schedule for one batch. A separate process measures them.

    Roles:

    - `stage`: records activations (EmbracingFL's multi-step forward pass).
    - `initialise`: fills personal tensors once.
    - `forward`: predicts with the trained part.
    - `step`: runs one training signature once, if the training has several signatures.
    - `train`: does all training work for one batch.
    - `evaluate`: evaluates one batch.

    `name` is the name of the signature, or of all signatures. `cold_start_s` is the time from the
    start of the process until the sessions are ready. `first_s` is the time of the first run, and
    `steady` has the times after the warm-up. `predicted_bytes` is the manifest's prediction of
    `above_idle_bytes`.
    """

    name: Text
    role: Role
    steady: Duration
    first_s: Seconds
    cold_start_s: Seconds | None = None
    memory: Memory | None = None
    predicted_bytes: Bytes | None = None


class Point(Struct, frozen=True, kw_only=True):
    """Training steps in one interval of a sustained run, `at_s` seconds after its start."""

    at_s: Seconds
    step: Duration
    temperature_c: Celsius | None
    clock_hz: Whole | None


class Sustained(Struct, frozen=True, kw_only=True):
    """Training without a pause for `duration_s` seconds, to show how heat slows the steps.

    `first` and `last` are the steps in the first and the last `window_s` seconds: one minute, or
    half of a run that is shorter than two minutes.
    """

    duration_s: Seconds
    window_s: Seconds
    first: Duration
    last: Duration
    points: Annotated[tuple[Point, ...], msgspec.Meta(min_length=1, max_length=MOST)]

    @property
    def slowdown(self) -> float:
        """Relative growth of the median step from the start to the end: 0.1 means 10% longer."""
        return self.last.median_s / self.first.median_s - 1 if self.first.median_s else 0.0


class Conditions(Struct, frozen=True, kw_only=True):
    """Temperature, clock and power at one moment. Figures that are not reported are None.

    `throttled` names the reasons why the processor is slowed down. `battery` is the charge, 0 to 1.
    """

    temperature_c: Celsius | None = None
    governor: Text | None = None
    clock_hz: Whole | None = None
    throttled: tuple[Text, ...] | None = None
    battery: Share | None = None
    charging: bool | None = None


class Energy(Struct, frozen=True, kw_only=True):
    """The energy that all programs of the machine used.

    If `source` is `processor`, the processor's counter measured only the processor. If it is
    `battery`, the figure is the charge that the battery lost.
    """

    joules: Annotated[float, msgspec.Meta(ge=0, le=1e12)]
    source: Literal["processor", "battery"]

    def __str__(self) -> str:
        return f"{self.joules:.0f} J of the {self.source}"


class Method(Struct, frozen=True, kw_only=True):
    """How the figures were measured.

    If `source` is `profile`, each phase was measured in a separate process. If it is `training`,
    the training of a round was measured. The figures come from `runs` runs. The `warm_up_runs`
    earlier runs do not count. `threads` 0 means one for each core. `arena` describes the memory
    settings of the runtime.
    """

    source: Literal["profile", "training"]
    clock: Text
    warm_up_runs: Whole
    runs: Count
    threads: Whole
    arena: Text


class Validity(Struct, frozen=True, kw_only=True):
    """Whether the figures are reliable.

    `invalid` lists the reasons why the figures are not reliable. `unstable` names the phases whose
    times vary too much: their spread is above UNSTABLE_SPREAD.
    """

    invalid: tuple[Text, ...] = ()
    unstable: tuple[Text, ...] = ()


class Profile(Struct, frozen=True, kw_only=True):
    """Time and memory of one bundle on one machine.

    `structure` is the SHA-256 of the bundle's signatures and tensor table. It stays the same in all
    rounds of one submodel and differs between models. `measured_at` is in UTC, ISO 8601. `energy`
    is the energy of the whole measurement or training, or None if the machine does not report it.
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
    energy: Energy | None = None

    def of_role(self, role: Role) -> tuple[Phase, ...]:
        """The phases with this role, in the order of the schedule."""
        return tuple(phase for phase in self.phases if phase.role == role)

    @property
    def train(self) -> Duration:
        """Time of all training work for one batch."""
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
        """The training phase with the highest process peak; None if no peak is known."""
        known = [p for p in self.phases if p.role not in ("forward", "evaluate") and _peak(p)]
        return max(known, key=_peak, default=None)

    @property
    def peak_bytes(self) -> int | None:
        """Process peak of the training in bytes, including Python and the runtime."""
        return None if self.decisive is None else _peak(self.decisive)

    def _only(self, role: Role) -> Duration:
        phases = self.of_role(role)
        if not phases:
            raise InputError(
                "The profile of {submodel} has no {phase!r} phase. Measure the bundle with "
                "`edgetailor-agent profile`.",
                code="profile.missing-phase",
                phase=role,
                submodel=self.submodel,
            )
        return phases[0].steady


def _peak(phase: Phase) -> int:
    return (phase.memory and phase.memory.peak_bytes) or 0


def unstable(phases: Iterable[Phase]) -> tuple[str, ...]:
    """Names of the phases whose times vary too much to be reliable."""
    return tuple(phase.name for phase in phases if phase.steady.spread > UNSTABLE_SPREAD)


def this_machine(runtime: str) -> Machine:
    """Describe the machine of this process.

    Args:
        runtime: Name and version of the runtime's library.
    """
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
    """Name of the processor. ARM kernels report the model of the board instead."""
    text = _read(PROC / "cpuinfo")
    # All cores of a machine usually have the same name, so the first is enough.
    names = [line.partition(":")[2] for line in text.splitlines() if line.startswith("model name")]
    return names[0].strip() if names else None


def _first_line(path: Path) -> str | None:
    return _read(path).partition("\n")[0].strip() or None


def _read(path: Path) -> str:
    """Text of a file without control characters; empty if it cannot be read."""
    try:
        # Texts of the device tree end with a zero byte.
        return re.sub(f"(?!\\n)[{CONTROLS}]", " ", path.read_text(errors="replace"))
    except OSError:
        return ""
