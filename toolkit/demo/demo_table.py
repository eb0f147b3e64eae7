"""The result of the demo: a table for people and a JSON document for programs."""

from dataclasses import asdict
from statistics import fmean
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from profiles.documents.bundle_profile import Duration
from profiles.text_formatting import (
    NOT_MEASURABLE,
    UNKNOWN_CELL,
    counted,
    format_bytes,
    format_duration,
    megabytes,
    milliseconds,
)
from toolkit import terminal_output
from toolkit.demo import demo_settings
from toolkit.demo.demo_result import DemoResult, DeviceReport

REPORT_VERSION = 1
COLUMNS = (
    "samples", "params", "got\n%", "own\n%", "down\nMB", "up\nMB", "forward\nms", "backprop\nms",
    "peak\nMB",
)  # fmt: skip
UNSTEADY = "~"
SPREAD = 2.0
"""A time is marked as unsteady if its p90 is more than this many times its median."""


def show(result: DemoResult) -> None:
    """Print the table, the accuracies and the output files on stdout."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(table(result), soft_wrap=False)
    for line in notes(result):
        console.print(line, style="dim")
    console.print()
    console.print(
        f"Accuracy {result.accuracy:.1%} on {result.held_out_samples} held-out digits after "
        f"{counted(result.rounds, 'round')}, in {format_duration(result.elapsed_s)}",
        style="bold",
    )
    for line in (*comparisons(result), *uses(result)):
        console.print(line)
    console.print(f"charts: {result.curve}")
    console.print(f"everything: {result.out}")


def table(result: DemoResult) -> Table:
    """A row for each device, at most 80 columns wide."""
    rows = terminal_output.table("device", "submodel", *COLUMNS)
    rows.columns[1].justify, rows.padding = "left", (0, 1, 0, 0)
    for device in result.devices:
        rows.add_row(device.name, device.submodel, *figures(device))
    return rows


def figures(device: DeviceReport) -> tuple[str, ...]:
    """The cells of one device under `COLUMNS`."""
    profile = device.profile
    return (
        f"{device.samples:,}",
        f"{device.params:,}",
        *map(percent, accuracies(device)),
        megabytes(device.bytes_down, 2),
        megabytes(device.bytes_up, 2),
        _mark(profile.forward) + milliseconds(profile.forward.median_s),
        _mark(profile.forward, profile.train) + milliseconds(profile.backprop_s),
        megabytes(profile.peak_bytes, 0),
    )


def accuracies(device: DeviceReport) -> tuple[float | None, float | None]:
    """The accuracies of the received and the device's own model on its held-out samples."""
    if device.evaluation is None:
        return None, None
    return device.evaluation.before.means().accuracy, device.evaluation.after.means().accuracy


def percent(share: float | None) -> str:
    """A share from 0 to 1 as a cell of the table."""
    return UNKNOWN_CELL if share is None else f"{100 * share:.0f}"


def _mark(*measured: Duration) -> str:
    """The mark `UNSTEADY` if a measured time varies too much; else empty."""
    return UNSTEADY if any(d.p90_s > SPREAD * d.median_s for d in measured) else ""


def notes(result: DemoResult) -> list[str]:
    """Explanations of the table's figures."""
    profile = result.devices[0].profile
    lines = [
        f"got, own: accuracy on the {demo_settings.EVALUATION_SHARE:.0%} of samples that a device "
        "keeps apart. got: of the",
        "last round's model; own: after the device trained it (cp: the personal model).",
        f"down, up: all rounds together. forward, backprop: one batch of {profile.batch_size}, one "
        "thread.",
        "peak: process peak, the whole agent with Python and its runtime.",
    ]
    if any(_mark(d.profile.forward, d.profile.train) for d in result.devices):
        lines.append(
            f"{UNSTEADY}: unsteady; the slowest tenth of the runs took over twice the median."
        )
    if any(device.profile.peak_bytes is None for device in result.devices):
        lines.append(f"{UNKNOWN_CELL}: {NOT_MEASURABLE} on this system.")
    full = max((d.params for d in result.devices if d.submodel == "full"), default=None)
    if full is not None and any(_is_cp(d) and d.params > full for d in result.devices):
        lines.append("cp: more params than full: a personal model is trained in addition.")
    return lines


def _is_cp(device: DeviceReport) -> bool:
    return device.submodel.partition(":")[0] == "cp"


def comparisons(result: DemoResult) -> list[str]:
    """The accuracies of the baselines, and the memory of the larger model's submodels."""
    alone = [curve[-1] for curve in result.baselines.alone.values()]
    lines = []
    if result.baselines.all_full is not None:
        lines.append(f"all devices full: {result.baselines.all_full[-1]:.1%}")
    lines.append(
        f"each device alone: mean {fmean(alone):.1%}, from {min(alone):.1%} to {max(alone):.1%}"
    )
    peaks = ", ".join(
        f"{memory.submodel} {megabytes(memory.above_idle_bytes, 0)}"
        for memory in result.larger_model
        if memory.above_idle_bytes is not None
    )
    if peaks:
        lines += [
            f"{demo_settings.LARGER_NAME}, batch {demo_settings.LARGER_BATCH}, MB above the idle "
            "agent:",
            f"  {peaks}",
        ]
    return lines


def uses(result: DemoResult) -> list[str]:
    """Lines about the last model: how devices judge it, its deployed files, and predictions."""
    lines = []
    judged = result.history[-1].devices
    if judged is not None:
        lines.append(f"on the devices: {judged.text()}")
    shown = set[tuple[str, str]]()
    for model in result.deployed:
        if (model.submodel, model.precision) not in shown:  # several kinds may have the same file
            shown.add((model.submodel, model.precision))
            size = format_bytes(model.bytes)
            lines.append(
                f"deployed {model.submodel} as {model.precision}: {size}, {model.accuracy:.1%}"
            )
    correct = sum(device.correct for device in result.devices)
    digits = demo_settings.PREDICTED * len(result.devices)
    lines.append(f"{len(result.devices)} devices predict {digits} digits with it: {correct} right")
    return lines


def as_json(result: DemoResult) -> dict[str, Any]:
    """The document that `demo --json` prints: bytes, seconds, and shares from 0 to 1."""
    profile = result.devices[0].profile
    return {
        "version": REPORT_VERSION,
        "folder": str(result.out),
        "accuracy_curve": str(result.curve),
        "seed": result.seed,
        "all_full": result.all_full,
        "rounds": result.rounds,
        "elapsed_s": round(result.elapsed_s, 1),
        "held_out_samples": result.held_out_samples,
        "accuracy": result.accuracy,
        "history": [asdict(entry) for entry in result.history],
        "batch_size": profile.batch_size,
        "threads": profile.method.threads,
        "machine": msgspec.to_builtins(profile.machine),
        "devices": [device_json(device) for device in result.devices],
        "deployed": [asdict(model) for model in result.deployed],
        "baselines": asdict(result.baselines),
        "larger_model": {
            "model": demo_settings.LARGER_MODEL,
            "batch_size": demo_settings.LARGER_BATCH,
            "training_above_idle_bytes": {
                memory.submodel: memory.above_idle_bytes for memory in result.larger_model
            },
        },
    }


def device_json(device: DeviceReport) -> dict[str, Any]:
    """The entry of one device. A figure that could not be measured is null."""
    return {
        "device": device.name,
        "submodel": device.submodel,
        "samples": device.samples,
        "params": device.params,
        "capacity": device.capacity,
        "bytes_down": device.bytes_down,
        "bytes_up": device.bytes_up,
        "evaluation": msgspec.to_builtins(device.evaluation),
        "predicted_correctly": device.correct,
        "forward_s": device.profile.forward.median_s,
        "backprop_s": device.profile.backprop_s,
        "process_peak_bytes": device.profile.peak_bytes,
    }
