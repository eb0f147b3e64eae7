"""Formats a profile as plain text of 80 columns."""

from collections.abc import Sequence

from profiles.documents.bundle_profile import (
    UNSTABLE_SPREAD,
    Conditions,
    Phase,
    Profile,
    Role,
    Sustained,
)
from profiles.text_formatting import (
    NOT_MEASURABLE,
    UNKNOWN_CELL,
    format_bytes,
    format_seconds,
    megabytes,
    milliseconds,
)

LABELS: dict[Role, str] = {
    "stage": "stage",
    "initialise": "initialise",
    "forward": "forward pass",
    "step": "step",
    "train": "training step",
    "evaluate": "evaluation",
}
COLUMNS = ("", "ms", "p10", "p90", "n", "first", "cold s", "MB", "predicted")
LEGEND = (
    "ms: median time of one batch; first: first run; cold s: process start until the",
    "session is open; MB: peak above the idle process; predicted: from the manifest.",
)


def label(phase: Phase) -> str:
    """The label of a phase, with its signature if a profile may have several such phases."""
    named = phase.role in ("stage", "step")
    return f"{LABELS[phase.role]} {phase.name}" if named else LABELS[phase.role]


def summary(profile: Profile) -> list[str]:
    """Format a profile.

    Args:
        profile: The profile of a bundle.

    Returns:
        Lines of text.
    """
    about = profile.machine
    return [
        f"{profile.submodel}, batch {profile.batch_size}, threads "
        f"{profile.method.threads or 'all'}, {about.runtime} on {about.architecture}",
        *table([COLUMNS, *(row(phase) for phase in profile.phases)]),
        *LEGEND,
        f"backprop      {format_seconds(profile.backprop_s)} (training step minus forward pass)",
        *memory(profile),
        f"machine       {conditions(profile.before, profile.after)}",
        f"energy        {profile.energy or NOT_MEASURABLE}",
        *(sustained(profile.sustained) if profile.sustained else []),
        *verdict(profile),
    ]


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows of cells as a table.

    Args:
        rows: The cells of each row. All rows have the same length.

    Returns:
        One line per row. The first column is left-aligned. All other columns are right-aligned.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in rows
    ]


def row(phase: Phase) -> tuple[str, ...]:
    """The cells of a phase. An unknown value is a dash."""
    time = phase.steady
    above = None if phase.memory is None else phase.memory.above_idle_bytes
    return (
        label(phase),
        milliseconds(time.median_s),
        milliseconds(time.p10_s),
        milliseconds(time.p90_s),
        str(time.runs),
        milliseconds(phase.first_s),
        UNKNOWN_CELL if phase.cold_start_s is None else f"{phase.cold_start_s:.2f}",
        megabytes(above),
        megabytes(phase.predicted_bytes),
    )


def memory(profile: Profile) -> list[str]:
    """Format the peak memory of the process, and its parts."""
    phase = profile.decisive
    if phase is None or phase.memory is None:
        return [f"process peak  {NOT_MEASURABLE}"]
    measured = phase.memory
    lines = [
        f"process peak  {format_bytes(measured.peak_bytes)}, {label(phase)} "
        "(with Python and runtime)"
    ]
    if measured.idle is not None and measured.held is not None:
        lines += [
            f"  {name:<11} anonymous {format_bytes(pages.anonymous_bytes)}, "
            f"file pages {format_bytes(pages.file_bytes)}"
            for name, pages in (("idle", measured.idle), ("at the end", measured.held))
        ]
    return lines


def conditions(before: Conditions, after: Conditions) -> str:
    """Format temperature, clock and power before and after. Also name unknown figures."""
    texts = {
        "temperature": change(before.temperature_c, after.temperature_c, "{:.1f} C"),
        "governor": before.governor,
        "clock": change(gigahertz(before), gigahertz(after), "{:.2f} GHz"),
        "battery": change(before.battery, after.battery, "battery {:.0%}"),
        "power": {None: None, True: "charging", False: "on battery"}[after.charging],
    }
    known = [text for text in texts.values() if text]
    # Desktops have no battery and need no governor, so missing ones are not mentioned.
    unknown = [name for name in ("temperature", "clock") if texts[name] is None]
    unknown += ["throttling"] if before.throttled is None else []
    if unknown:
        known.append(f"{listed(unknown)} {NOT_MEASURABLE}")
    return ", ".join(known)


def gigahertz(moment: Conditions) -> float | None:
    """The clock rate in GHz; None if unknown."""
    return None if moment.clock_hz is None else moment.clock_hz / 1e9


def listed(words: Sequence[str]) -> str:
    """Join one or more words with commas and "and"."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def change(before: float | None, after: float | None, form: str) -> str | None:
    """Format a value before and after, or only once if it did not change; None if unknown."""
    if before is None or after is None:
        return None
    first, last = form.format(before), form.format(after)
    return first if first == last else f"{first} to {last}"


def sustained(run: Sustained) -> list[str]:
    """Describe how the time of a step changed during a sustained run."""
    return [
        f"sustained     {run.duration_s:.0f} s: step {format_seconds(run.first.median_s)} in "
        f"the first {run.window_s:.0f} s,",
        f"              {format_seconds(run.last.median_s)} in the last ({run.slowdown:+.1%})",
    ]


def verdict(profile: Profile) -> list[str]:
    """List the reasons why the measurement is invalid or unstable; empty if it is reliable."""
    unstable = [
        f"{label(phase)} ({phase.steady.spread:.0%})"
        for phase in profile.phases
        if phase.name in profile.validity.unstable
    ]
    lines = [f"INVALID       {reason}" for reason in profile.validity.invalid]
    if unstable:
        lines.append(f"unstable      p10 to p90 wider than {UNSTABLE_SPREAD:.0%} of the median:")
        lines += [f"              {name}" for name in unstable]
    return lines
