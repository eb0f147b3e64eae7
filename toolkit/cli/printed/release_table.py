"""Prints the releases of a federation and what each device runs."""

from collections.abc import Iterator, Sequence

from rich.console import Console

from device_agent.formats.evaluation_counts import EvaluationCounts
from device_agent.formats.protocol.releases import ReleaseReport
from profiles.text_formatting import counted
from toolkit.coordinator.releases.release_status import DeviceRelease
from toolkit.coordinator.storage.release_folder import Release
from toolkit.terminal_output import filled, print_table, table

SHOWN = 10
"""How many releases the table has."""


def show_releases(releases: Sequence[Release], devices: Sequence[DeviceRelease]) -> None:
    """Print a row for each release, a row for each device, and why devices refused a release."""
    rows = table("release", "round", "kinds", "precision", "devices", "note")
    for column in (2, 3, 5):
        rows.columns[column].justify = "left"
    for release in releases[-SHOWN:]:
        rows.add_row(
            str(release.number),
            str(release.round),
            ", ".join(release.kinds),
            release.precision,
            "all" if release.devices is None else str(len(release.devices)),
            ", ".join(_notes(release)),
        )
    print_table(rows)
    if len(releases) > SHOWN:
        print(f"{counted(len(releases) - SHOWN, 'earlier release')}: --json")
    if not devices:
        return
    print()
    tuned = any(d.report is not None and d.report.fine_tuned for d in devices)
    columns = ["tuned"] if tuned else []
    rows = table("device", "runs", "offered", "answer", "before", "after", *columns)
    rows.columns[3].justify = "left"
    for device in devices:
        report = device.report
        if report is not None and report.number != device.offered:
            report = None  # its figures are those of another release
        rows.add_row(
            device.device if device.name == device.device else f"{device.device} ({device.name})",
            "" if device.runs is None else str(device.runs or "none"),
            str(device.offered or "none"),
            device.answer,
            *("", "") if report is None else (_figure(report.before), _figure(report.after)),
            *([_tuned(report)] if tuned else []),
        )
    print_table(rows)
    if tuned:
        print("tuned: the fine-tuned release; * if the device predicts with it")
    if any(device.report is not None and device.report.before for device in devices):
        print("before, after: its present model and the release on the device's own samples")
    width = Console().width
    for device in devices:
        if device.report is not None and not device.report.taken:
            text = f"{device.device}, release {device.report.number}: {device.report.reason}"
            print(filled(text, width, indent="  "))


def _tuned(report: ReleaseReport | None) -> str:
    """The figure of the fine-tuned model, with a star if the device predicts with it."""
    if report is None:
        return ""
    return _figure(report.fine_tuned) + ("*" if report.runs_fine_tuned else "")


def _notes(release: Release) -> Iterator[str]:
    if release.withdrawn:
        yield "withdrawn"
    elif not release.offered_kinds:
        yield "bundles removed"
    elif release.devices is not None:
        yield "at a share"
    if release.then_all:
        yield "then all"
    if release.fine_tune:
        yield f"fine-tune {release.fine_tune}"


def _figure(counts: EvaluationCounts | None) -> str:
    if counts is None:
        return ""
    means = counts.means()
    if counts.correct is None:
        return f"loss {means.loss:.4f}"
    return f"{counts.correct / max(counts.counted, 1):.1%}"
