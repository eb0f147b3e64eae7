"""The profile document: what one bundle costs on one machine, in named units.

A figure that could not be measured is None and prints as "not measurable", never as 0.
"""

import platform

import msgspec

PROFILE_VERSION = 1


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where a measurement was taken. Measurements from unlike machines are never merged."""

    system: str
    architecture: str
    processor: str | None
    cpu_count: int
    memory_bytes: int | None
    python: str
    runtime: str


class Duration(msgspec.Struct, frozen=True, kw_only=True):
    """Spread of one signature's run time over `runs` counted runs, in seconds."""

    median_s: float
    p10_s: float
    p90_s: float
    runs: int


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Time and memory of one bundle on one machine.

    `forward` and `train` are one batch each (seconds); backprop is their difference. Memory is the
    process's peak resident set (VmHWM) and its part above the idle process, in bytes.
    """

    version: int = PROFILE_VERSION
    submodel: str
    machine: Machine
    threads: int
    batch_size: int
    forward: Duration
    train: Duration
    peak_bytes: int | None
    peak_above_idle_bytes: int | None

    @property
    def backprop_s(self) -> float:
        """Median train step minus median forward pass, in seconds."""
        return self.train.median_s - self.forward.median_s


def this_machine(runtime: str) -> Machine:
    """Describe the machine that this process runs on; `runtime` names library and version."""
    import os

    memory = None
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        architecture=platform.machine(),
        processor=platform.processor() or None,
        cpu_count=os.cpu_count() or 1,
        memory_bytes=memory,
        python=platform.python_version(),
        runtime=runtime,
    )
