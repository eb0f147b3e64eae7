"""The output of `edgetailor evaluate --leave-one-out`: a round without each of its devices."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from rich.text import Text

from profiles.text_formatting import counted
from toolkit.cli.printed.evaluation_table import NAME, clipped
from toolkit.terminal_output import print_table, table

if TYPE_CHECKING:
    from toolkit.coordinator.leave_one_out import WithoutDevice
    from toolkit.evaluation_sums import Evaluation

VERSION = 1


def show_without_devices(
    round_: int, every: "Evaluation", without: Sequence["WithoutDevice"]
) -> None:
    """Print the figures of a round's model, and its figures without the update of each device."""
    click.echo(f"round {round_} with {counted(len(without), 'update')}: {_figures(every)}")
    click.echo()
    by_loss = every.accuracy is None
    rows = table("without", "kind", "samples", *([] if by_loss else ["accuracy"]), "loss", "change")
    rows.columns[1].justify = "left"
    for own in without:
        update, evaluation = own.left_out, own.evaluation
        name = update.device if update.name == update.device else f"{update.device} ({update.name})"
        rows.add_row(
            Text(clipped(name, NAME)),
            Text(clipped(update.kind, NAME // 2)),
            f"{update.record.samples:,}",
            *([] if evaluation.accuracy is None else [f"{evaluation.accuracy:.2%}"]),
            f"{evaluation.loss:.4f}",
            _change(every, evaluation),
        )
    print_table(rows)
    if by_loss:
        click.echo("change: loss; below zero, the model is better without the device")
    else:
        click.echo("change: points of accuracy; above zero, the model is better without the device")


def as_json(
    round_: int, every: "Evaluation", without: Sequence["WithoutDevice"]
) -> dict[str, object]:
    """The document that `evaluate --leave-one-out --json` prints."""
    return {
        "version": VERSION,
        "document": "leave-one-out",
        "round": round_,
        **_object(every),
        "without": [
            {
                "device": own.left_out.device,
                "name": own.left_out.name,
                "kind": own.left_out.kind,
                "samples": own.left_out.record.samples,
                **_object(own.evaluation),
            }
            for own in without
        ],
    }


def _object(evaluation: "Evaluation") -> dict[str, object]:
    loss = evaluation.loss if math.isfinite(evaluation.loss) else None
    return {"accuracy": evaluation.accuracy, "loss": loss}


def _figures(evaluation: "Evaluation") -> str:
    accuracy = "" if evaluation.accuracy is None else f"accuracy {evaluation.accuracy:.2%}, "
    return f"{accuracy}loss {evaluation.loss:.4f}"


def _change(every: "Evaluation", without: "Evaluation") -> str:
    if every.accuracy is None or without.accuracy is None:
        return f"{without.loss - every.loss:+.4f}"
    return f"{100 * (without.accuracy - every.accuracy):+.2f}"
