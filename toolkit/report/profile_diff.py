"""Compares two profiles of one bundle and finds what became slower or larger."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from device_agent.profiling.profile_text import label, table
from profiles.documents.bundle_profile import Duration, Profile
from profiles.documents.bundle_profile_reading import machine_differences, same_hardware
from profiles.documents.profile_merging import refuse_other_bundle, refuse_other_method
from profiles.errors import InputError, RegressionError, UnstableError
from profiles.text_formatting import format_bytes, format_seconds

DIFF_VERSION = 1
SHORTEST_S = 1e-9
"""A time below this is treated as zero, because its relative growth is meaningless."""
Verdict = Literal["same", "better", "worse", "within spread", "unstable"]


@dataclass(frozen=True)
class Change:
    """A figure before and after: seconds of a phase, or bytes of its process peak."""

    phase: str
    unit: Literal["s", "bytes"]
    before: float
    after: float
    verdict: Verdict

    @property
    def share(self) -> float:
        """The relative growth: 0.1 is 10% more."""
        return self.after / self.before - 1 if self.before > SHORTEST_S else 0.0


@dataclass(frozen=True)
class Comparison:
    """All figures that both profiles have, and the differences of the machines."""

    submodel: str
    allowed: float
    changes: tuple[Change, ...]
    differences: tuple[str, ...]


def compare(
    before: Profile, after: Profile, allowed: float, other_machine: bool = False
) -> Comparison:
    """Compare two profiles of one bundle.

    Args:
        before: The earlier profile.
        after: The later profile.
        allowed: A relative growth up to this is not reported, for example 0.05.
        other_machine: Allow profiles of different machines.

    Returns:
        The change of each figure, with a verdict.

    Raises:
        InputError: The profiles are of different bundles, methods or machines.
        UnstableError: A profile was measured while the machine was throttled.
    """
    if not other_machine and not same_hardware(before.machine, after.machine):
        ways = list(machine_differences(before.machine, after.machine))
        raise InputError(
            "The profiles are of different machines: {differences}. Measure both on one machine, "
            "or compare them anyway with --other-machine.",
            code="profile.other-machine",
            differences=ways,
        )
    refuse_other_bundle(before, after)
    refuse_other_method(before, after)
    for profile in (before, after):
        if reasons := profile.validity.invalid:
            raise UnstableError(
                "The profile of {measured_at} was not measured at full speed ({explanation}): "
                "measure again.",
                code="measurement.throttled",
                measured_at=profile.measured_at,
                reasons=list(reasons),
                explanation="; ".join(reasons),
            )
    return Comparison(
        submodel=before.submodel,
        allowed=allowed,
        changes=tuple(_changes(before, after, allowed)),
        differences=tuple(machine_differences(before.machine, after.machine)),
    )


def require_no_regression(comparison: Comparison) -> None:
    """Check that nothing became slower or larger than allowed.

    Raises:
        RegressionError: A figure grew by more than allowed.
        UnstableError: No figure certainly grew, but a time that varied too much may have grown.
    """
    if worse := _named(comparison, "worse"):
        raise RegressionError(
            "{submodel} became worse by more than {allowed:.1%}: {worse}.",
            code="report.regression",
            submodel=comparison.submodel,
            allowed=comparison.allowed,
            worse=worse,
        )
    if unsure := _named(comparison, "unstable"):
        raise UnstableError(
            "The times in the two profiles of {submodel} vary too much to be compared: {unsure}. "
            "Measure both profiles again with more --runs, while nothing else runs on the machine. "
            "Or give two folders with several profiles each.",
            code="measurement.unstable",
            submodel=comparison.submodel,
            unsure=unsure,
        )


def _named(comparison: Comparison, verdict: Verdict) -> str:
    return ", ".join(
        f"{change.phase} {change.share:+.1%} {'time' if change.unit == 's' else 'peak memory'}"
        for change in comparison.changes
        if change.verdict == verdict
    )


def _changes(before: Profile, after: Profile, allowed: float) -> Iterator[Change]:
    unstable = {*before.validity.unstable, *after.validity.unstable}
    for earlier, later in zip(before.phases, after.phases, strict=True):
        times = earlier.steady, later.steady
        medians = times[0].median_s, times[1].median_s
        verdict = _verdict(*medians, allowed, _apart(times))
        # Noise can hide growth, so an unstable time is never called worse.
        if earlier.name in unstable and medians[1] > medians[0] * (1 + allowed):
            verdict = "unstable"
        yield Change(label(earlier), "s", *medians, verdict)
    for earlier, later in zip(before.phases, after.phases, strict=True):
        if earlier.memory is not None and later.memory is not None:
            peaks = earlier.memory.peak_bytes, later.memory.peak_bytes
            if peaks[0] is not None and peaks[1] is not None:
                verdict = _verdict(peaks[0], peaks[1], allowed, True)
                yield Change(label(earlier), "bytes", peaks[0], peaks[1], verdict)


def _apart(times: Sequence[Duration]) -> bool:
    """Whether each median is outside the p10 to p90 of the other times. This is rare by chance."""
    earlier, later = times
    return not (
        earlier.p10_s <= later.median_s <= earlier.p90_s
        or later.p10_s <= earlier.median_s <= later.p90_s
    )


def _verdict(before: float, after: float, allowed: float, apart: bool) -> Verdict:
    if abs(after - before) <= allowed * before:
        return "same"
    if not apart:
        return "within spread"
    return "worse" if after > before else "better"


def as_json(comparison: Comparison) -> dict[str, Any]:
    """The document that `report diff --json` prints: seconds and bytes by phase."""
    return {
        "version": DIFF_VERSION,
        "submodel": comparison.submodel,
        "allowed": comparison.allowed,
        "differences": list(comparison.differences),
        "changes": [
            {
                "phase": change.phase,
                f"before_{change.unit}": change.before,
                f"after_{change.unit}": change.after,
                "change": change.share,
                "verdict": change.verdict,
            }
            for change in comparison.changes
        ],
    }


def lines(comparison: Comparison) -> list[str]:
    """The comparison as lines of plain text, at most 80 columns wide."""
    figures = [
        (_name(c), _figure(c.before, c.unit), _figure(c.after, c.unit), f"{c.share:+.1%}")
        for c in comparison.changes
    ]
    head, *rows = table([("", "before", "after", "change"), *figures])
    verdicts = ["" if c.verdict == "same" else f"  {c.verdict}" for c in comparison.changes]
    said = [
        f"{comparison.submodel}: worse means more than {comparison.allowed:.1%} slower or larger",
        head,
    ]
    said += [row + verdict for row, verdict in zip(rows, verdicts, strict=True)]
    if any(change.verdict == "within spread" for change in comparison.changes):
        said.append("within spread: a median lies within the other's p10 to p90; measure longer")
    if any(change.verdict == "unstable" for change in comparison.changes):
        said.append("unstable: its times vary too much in one of the profiles; measure again")
    return said + [f"note: other {difference}" for difference in comparison.differences]


def _name(change: Change) -> str:
    return change.phase if change.unit == "s" else f"{change.phase}, peak"


def _figure(value: float, unit: str) -> str:
    return format_seconds(value) if unit == "s" else format_bytes(value)
