"""Formats the result of a calibration as plain text."""

from collections.abc import Sequence
from pathlib import Path

from profiles.cost_model.workload import PRODUCTS, amount
from profiles.documents.calibration_record import Timing
from profiles.documents.device_profile import DeviceProfile
from profiles.text_formatting import format_bytes, format_seconds

SHOWN = (
    ("convolution", "convolutions"),
    ("transposed", "transposed convolutions"),
    ("product", "matrix products"),
    ("arithmetic", "element-wise arithmetic"),
    ("reduction", "sums"),
    ("transposition", "transpositions"),
)


def summary(device: DeviceProfile, out: Path | None) -> list[str]:
    """Format a calibrated device.

    Args:
        device: The device with its calibration.
        out: The file to which the profile was written; None if there is no file.

    Returns:
        Lines of text, with the next command at the end if there is a file.
    """
    calibration = device.calibration
    assert calibration is not None
    lines = [
        f"{device.name}: {calibration.runtime}, threads {calibration.threads or 'all'} of "
        f"{device.cores} cores",
        f"memory       {format_bytes(device.memory_bytes)}, "
        f"{format_bytes(device.memory_available_bytes)} of it available",
        f"disk         {format_bytes(device.storage_free_bytes)} free",
    ]
    if calibration.memory is None:
        lines.append("agent        not measurable")
    else:
        lines.append(
            f"agent        {format_bytes(calibration.memory.idle_bytes)} idle, "
            f"{format_bytes(calibration.memory.session_bytes)} more for the first graph, "
            f"{format_bytes(calibration.memory.node_bytes)} for each of its nodes"
        )
    for kind, name in SHOWN:
        matching = [t for t in calibration.timings if t.kind == kind]
        lines.append(f"{name}: {rates(kind, matching)}")
    lines.append(
        f"a node {format_seconds(calibration.node_s)}, "
        f"an input or output {format_seconds(calibration.port_s)}, "
        f"a run {format_seconds(calibration.run_s)}, "
        f"a step of a loop {format_seconds(calibration.loop_step_s)}"
    )
    if out is not None:
        lines.append(f"profile: {out}")
        lines.append(f"next: edgetailor plan MODEL --input-shape SHAPE --profile {out}")
    return lines


def rates(kind: str, timings: Sequence[Timing]) -> str:
    """The slowest and the fastest rate of a kind of operation, as text."""
    unit = "GMAC/s" if kind in PRODUCTS else "G numbers/s"
    sorted_rates = sorted(amount(t.kind, t.sizes) / t.seconds / 1e9 for t in timings)
    return f"{sorted_rates[0]:.3g} to {sorted_rates[-1]:.3g} {unit}, {len(sorted_rates)} sizes"
