"""Merges profiles of one bundle on one machine."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from profiles.documents.bundle_profile import Duration, Memory, Phase, Profile, Validity, unstable
from profiles.documents.bundle_profile_reading import (
    machine_differences,
    method_differences,
    read_profile,
)
from profiles.errors import InputError


def read_merged(path: Path) -> Profile:
    """Read the profile in a file, or merge all profiles (`*.json`) of a folder.

    Raises InputError for the reasons of `read_profile` and `merge`, and for a folder without
    profiles.
    """
    if not path.is_dir():
        return read_profile(path)
    files = sorted(path.glob("*.json"))
    if not files:
        raise InputError(
            "{folder} has no profiles (files NAME.json). Give a profile, or a folder of profiles.",
            code="profile.empty-folder",
            folder=str(path),
        )
    return merge([read_profile(file) for file in files])


def merge(profiles: Sequence[Profile]) -> Profile:
    """Merge profiles of one bundle on one machine.

    The result has the median of the medians, the widest spread and the highest peaks. So its spread
    includes the differences between runs of the program. If one profile is invalid, for example
    because of throttling, the result is also invalid.

    Args:
        profiles: At least one profile.

    Raises:
        InputError: The profiles differ in machine, submodel or method.
    """
    first = profiles[0]
    for other in profiles[1:]:
        refuse_other_machine(first, other)
        refuse_other_method(first, other)
        refuse_other_bundle(first, other)
    if len(profiles) == 1:
        return first
    phases = tuple(
        _phase(same) for same in zip(*(profile.phases for profile in profiles), strict=True)
    )
    return msgspec.structs.replace(
        first,
        method=msgspec.structs.replace(first.method, runs=sum(p.method.runs for p in profiles)),
        # Times in UTC and ISO 8601 sort as text.
        measured_at=max(profile.measured_at for profile in profiles),
        phases=phases,
        after=profiles[-1].after,
        validity=Validity(
            invalid=tuple(dict.fromkeys(why for p in profiles for why in p.validity.invalid)),
            unstable=unstable(phases),
        ),
        sustained=next((p.sustained for p in reversed(profiles) if p.sustained), None),
    )


def refuse_other_machine(profile: Profile, other: Profile) -> None:
    """Raise InputError if the machines of two profiles, or their software, differ."""
    if differences := machine_differences(profile.machine, other.machine):
        raise InputError(
            "The profiles must be of the same machine; these machines differ in {differences}. "
            "Give profiles of one machine, measured with the same software.",
            code="profile.other-machine",
            differences=differences,
        )


def refuse_other_method(profile: Profile, other: Profile) -> None:
    """Raise InputError if two profiles were measured with different settings."""
    if differences := method_differences(profile, other):
        raise InputError(
            "The profiles of {first} and {second} differ in {differences}: measure both with the "
            "same settings.",
            code="profile.other-method",
            differences=differences,
            first=profile.submodel,
            second=other.submodel,
        )


def refuse_other_bundle(first: Profile, other: Profile) -> None:
    """Raise InputError if two profiles are of different bundles."""
    names = [tuple(phase.name for phase in profile.phases) for profile in (first, other)]
    if (first.submodel, first.structure, names[0]) != (other.submodel, other.structure, names[1]):
        raise InputError(
            "The profiles must be of the same bundle; these are of {first} ({first_structure}) "
            "and of {second} ({second_structure}).",
            code="profile.other-bundle",
            submodels=[first.submodel, other.submodel],
            first=first.submodel,
            first_structure=first.structure[:12],
            second=other.submodel,
            second_structure=other.structure[:12],
        )


def _phase(same: Sequence[Phase]) -> Phase:
    cold = [phase.cold_start_s for phase in same if phase.cold_start_s is not None]
    return msgspec.structs.replace(
        same[0],
        steady=_duration([phase.steady for phase in same]),
        first_s=median(phase.first_s for phase in same),
        cold_start_s=median(cold) if cold else None,
        memory=_highest([phase.memory for phase in same if phase.memory is not None]),
    )


def _duration(same: Sequence[Duration]) -> Duration:
    # p10 and p90 take the extremes of all runs: the merged spread covers each single spread.
    return Duration(
        median_s=median(duration.median_s for duration in same),
        p10_s=min(duration.p10_s for duration in same),
        p90_s=max(duration.p90_s for duration in same),
        runs=sum(duration.runs for duration in same),
    )


def _highest(known: Sequence[Memory]) -> Memory | None:
    """The memory figures of the run with the highest peak. All figures are from this run."""
    return max(known, key=lambda memory: memory.peak_bytes or 0, default=None)
