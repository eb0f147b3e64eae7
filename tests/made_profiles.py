"""Profiles with figures that were not measured, for what reads, merges, draws or compares them."""

import msgspec

from profiles.documents.bundle_profile import (
    Conditions,
    Duration,
    Machine,
    Memory,
    Method,
    Pages,
    Phase,
    Profile,
    Role,
    Validity,
)

MACHINE = Machine(
    system="Linux 6.12.34",
    architecture="aarch64",
    processor=None,
    cpu_count=4,
    memory_bytes=3_978_321_920,
    python="3.13.5",
    runtime="onnxruntime 1.31.1",
    model="Raspberry Pi 4 Model B Rev 1.4",
)
IDLE = Pages(anonymous_bytes=28_000_000, file_bytes=32_000_000)


def made_duration(median_s: float, spread: float = 0.1) -> Duration:
    """A spread around the median of `spread` of it, from p10 to p90."""
    half = median_s * spread / 2
    return Duration(median_s=median_s, p10_s=median_s - half, p90_s=median_s + half, runs=20)


def made_phase(
    name: str,
    role: Role,
    median_s: float,
    above: int | None,
    spread: float = 0.1,
) -> Phase:
    """A phase that takes `above` bytes more than the idle process's 60 MB; one less predicted."""
    memory = None
    if above is not None:
        held = msgspec.structs.replace(IDLE, anonymous_bytes=IDLE.anonymous_bytes + above)
        memory = Memory(idle=IDLE, peak_bytes=60_000_000 + above, held=held)
    return Phase(
        name=name,
        role=role,
        steady=made_duration(median_s, spread),
        first_s=2 * median_s,
        cold_start_s=0.5,
        memory=memory,
        predicted_bytes=None if above is None else above - 1,
    )


def made_profile(submodel: str, *phases: Phase, structure: str = "0" * 64) -> Profile:
    """A profile of `phases` on MACHINE, a quiet one."""
    return Profile(
        submodel=submodel,
        structure=structure,
        machine=MACHINE,
        versions={"edgetailor": "0.1.0", "numpy": "2.4.6"},
        method=Method(
            source="profile",
            clock="clock_gettime(CLOCK_MONOTONIC)",
            warm_up_runs=3,
            runs=20,
            threads=1,
            arena="CPU arena on, memory pattern off, buffer reuse off",
        ),
        measured_at="2026-11-21T22:39:54+00:00",
        batch_size=32,
        phases=phases,
        before=Conditions(temperature_c=48.3, governor="ondemand", throttled=()),
        after=Conditions(temperature_c=61.2, governor="ondemand", throttled=()),
        validity=Validity(),
    )


def full(factor: float = 1.0, spread: float = 0.1) -> Profile:
    """The whole model: 100 ms forward, 400 ms a step, 60 MB above idle; times `factor`."""
    return made_profile(
        "full",
        made_phase("predict", "forward", 0.1 * factor, 20_000_000, spread),
        made_phase("train", "train", 0.4 * factor, int(60_000_000 * factor), spread),
    )


def sliced() -> Profile:
    """A slice behind one frozen stage: 50 ms and 60 ms forward, 160 ms a step, 40 MB above idle."""
    return made_profile(
        "slice:blocks.3",
        made_phase("forward_0", "stage", 0.05, 21_000_000),
        made_phase("predict", "forward", 0.06, 20_000_000),
        made_phase("train", "train", 0.16, 40_000_000),
        structure="1" * 64,
    )
