"""The charts and figures of the operator's page, in the form in which `page.ts` draws them."""

import math
from collections.abc import Sequence
from typing import Any

from profiles.text_formatting import format_bytes
from toolkit.coordinator.operation.messages import DeviceDetail, RoundQuality

Chart = dict[str, Any]


def quality_chart(quality: Sequence[RoundQuality]) -> Chart:
    """The accuracy by round, on held-out data and on devices; without accuracies, the loss."""
    results = [row.result for row in quality]
    judged = [result.devices for result in results]
    lines: dict[str, Sequence[float | None]] = {
        "accuracy on held-out data": [result.accuracy for result in results],
        "accuracy on the devices": [None if d is None else d.accuracy for d in judged],
    }
    if all(value is None for values in lines.values() for value in values):
        lines = {
            "loss on held-out data": [result.loss for result in results],
            "loss on the devices": [None if d is None else d.loss for d in judged],
        }
    best = next((row.result.round for row in quality if row.best), None)
    return _chart([result.round for result in results], lines, best)


def loss_chart(detail: DeviceDetail) -> Chart:
    """The losses before and after each training of a device."""
    updates = detail.updates[::-1]
    first, last = [u.loss_first for u in updates], [u.loss_last for u in updates]
    return _chart([u.round for u in updates], {"last loss": last, "first loss": first}, None)


def _chart(rounds: list[int], lines: dict[str, Sequence[float | None]], best: int | None) -> Chart:
    """Make a chart of `lines`, without lines that have no finite number."""
    known = {label: [_finite(value) for value in values] for label, values in lines.items()}
    shown = [
        {"label": label, "values": values}
        for label, values in known.items()
        if any(value is not None for value in values)
    ]
    return {"rounds": rounds, "lines": shown, "best": best if shown else None}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def machine_rows(detail: DeviceDetail) -> list[tuple[str, str]]:
    """What is known about a device's machine, by names that people read."""
    known = {name: value for name, value in detail.machine.items() if value is not None}
    if "cpu_count" in known:
        known["cores"] = f"{known.pop('cpu_count'):,}"
    if "memory_bytes" in known:
        known["memory"] = format_bytes(known.pop("memory_bytes"))
    return [(name.replace("_", " ").capitalize(), str(value)) for name, value in known.items()]
