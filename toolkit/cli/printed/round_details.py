"""The output of `edgetailor rounds --round`: one round by class, by kind and by device."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from rich.text import Text

from device_agent.formats.class_counts import ClassCounts, worst_class_text
from device_agent.formats.protocol.fleet import (
    FederatedEvaluation,
    KindEvaluation,
    further_figures,
    further_text,
)
from profiles.text_formatting import counted
from toolkit.cli.printed.evaluation_table import NAME, clipped, show_classes_compared
from toolkit.terminal_output import filled, print_table, table

if TYPE_CHECKING:
    from toolkit.coordinator.storage.judging_devices import JudgingDevice
    from toolkit.coordinator.storage.saved_rounds import SavedRound

DEVICES = 20
"""The most devices that are printed."""


def show_round(saved: "SavedRound", devices: Sequence["JudgingDevice"]) -> None:
    """Print the figures of a round: in all, by class, by kind and by device."""
    click.echo(round_line(saved))
    for device, reason in list(saved.left_out.items())[:DEVICES]:
        click.echo(filled(f"left out {device}: {reason}", 80, "  "))
    for device, limited in list(saved.limited.items())[:DEVICES]:
        click.echo(filled(f"limited {device}: {limited.text()}", 80, "  "))
    by_class = classes_of(saved)
    if by_class:
        click.echo()
        show_classes_compared(str, by_class, difference=False)
    if saved.devices is not None:
        click.echo()
        show_federated(saved.devices)
    if devices:
        click.echo()
        show_devices(devices)


def round_line(saved: "SavedRound") -> str:
    """A round and its figures in one line."""
    figures = [] if saved.accuracy is None else [f"accuracy {saved.accuracy:.2%}"]
    figures += [] if saved.loss is None else [f"loss {saved.loss:.4f}"]
    quality = ", ".join(figures) or "no figures on held-out data"
    quality += further_text(saved.held_out)
    return f"round {saved.round}, from {counted(saved.updates, 'update')}: {quality}"


def classes_of(saved: "SavedRound") -> dict[str, ClassCounts]:
    """The counts of each class, on held-out data and on the devices, as far as they are known."""
    known: dict[str, ClassCounts] = {}
    if saved.held_out is not None and saved.held_out.classes:
        known["held-out"] = saved.held_out.classes
    if saved.devices is not None and saved.devices.classes:
        known["devices"] = saved.devices.classes
    return known


def worst_classes(saved: "SavedRound") -> list[str]:
    """Lines that name a class far below the mean."""
    texts = {where: worst_class_text(counts) for where, counts in classes_of(saved).items()}
    return [
        f"worst class after round {saved.round} ({where}): {text}"
        for where, text in texts.items()
        if text is not None
    ]


def show_federated(judged: FederatedEvaluation) -> None:
    """Print how the devices judge a model: all devices, their mean, the worst tenth, each kind."""
    further = list(further_figures(judged))
    rows = table("on the devices", "devices", "labels", *heads(judged.accuracy is None), *further)
    rows.add_row("all", *pooled(judged, further))
    rows.add_row("mean of devices", "", "", *shown(judged.mean_accuracy, judged.mean_loss))
    rows.add_row("worst tenth", "", "", *shown(judged.worst_accuracy, judged.worst_loss))
    for name, kind in judged.kinds.items():
        rows.add_row(Text(clipped(f"kind {name}", NAME)), *pooled(kind, further))
    print_table(rows)


def heads(by_loss: bool) -> tuple[str, str]:
    """The headings of the figures before and after local training."""
    return ("loss", "trained") if by_loss else ("accuracy", "trained")


def pooled(figures: KindEvaluation, further: Sequence[str]) -> tuple[str, ...]:
    """The cells of a table's row: the figures of all devices, or of one kind of device.

    The row also has a cell for each figure named in `further`.
    """
    known = further_figures(figures)
    return (
        f"{figures.devices:,}",
        f"{figures.counted:,}",
        *shown(figures.accuracy, figures.loss),
        *shown(figures.trained_accuracy, figures.trained_loss),
        *(f"{known[name]:.4g}" if name in known else "" for name in further),
    )


def shown(accuracy: float | None, loss: float | None) -> tuple[str]:
    """The accuracy as text; the loss if there is no accuracy."""
    if accuracy is not None:
        return (f"{accuracy:.1%}",)
    return ("" if loss is None else f"{loss:.4f}",)


def show_devices(devices: Sequence["JudgingDevice"]) -> None:
    """Print a line for each device, the worst first."""
    rows = table("device", "kind", "labels", *heads(devices[0].accuracy is None))
    rows.columns[1].justify = "left"
    for own in devices[:DEVICES]:
        name = own.device if own.name == own.device else f"{own.device} ({own.name})"
        rows.add_row(
            Text(clipped(name, NAME)),
            Text(clipped(own.kind, NAME // 2)),
            f"{own.labels:,}",
            *shown(own.accuracy, own.loss),
            *shown(own.trained_accuracy, own.trained_loss),
        )
    print_table(rows)
    if len(devices) > DEVICES:
        click.echo(f"The {DEVICES} worst of {len(devices):,} devices; --json has all.")
