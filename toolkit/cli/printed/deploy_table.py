"""Prints the result of `edgetailor deploy`: a row for each bundle, then why it has its submodel."""

from collections.abc import Sequence

from rich.console import Console

from profiles.text_formatting import format_bytes, format_seconds
from toolkit.deployment.card_text import device_text
from toolkit.deployment.deploy_targets import Outcome
from toolkit.deployment.model_card import ModelCard, Quality
from toolkit.terminal_output import filled, table

COLUMNS = ("submodel", "graph", "accuracy", "loss", "memory", "time")
"""A column without any value is left out."""


def show_deployed(outcomes: Sequence[Outcome]) -> None:
    """Print a row for each bundle, the decisions, and the errors of those that failed."""
    cards = [outcome.deployed.card for outcome in outcomes if outcome.deployed is not None]
    known = [cells(card) for card in cards]
    shown = [n for n, _ in enumerate(COLUMNS) if n == 0 or any(row[n] for row in known)]
    rows = table("bundle", *(COLUMNS[n] for n in shown))
    rows.columns[1].justify = "left"
    for outcome in outcomes:
        row = ("failed",) if outcome.deployed is None else cells(outcome.deployed.card)
        rows.add_row(outcome.target.name, *(row[n] for n in shown if n < len(row)))
    console = Console(highlight=False)
    console.print(rows)
    if cards:
        print("memory: predicted for one sample, above the idle agent")
        if (whole := cards[0].global_quality) is not None:
            print(f"the whole model in PyTorch, float32: {' accuracy, loss '.join(figures(whole))}")
        if (judged := cards[0].device_quality) is not None:
            text = f"the whole model on the devices: {device_text(judged)}"
            print(filled(text, console.width, indent="  "))
    for outcome in outcomes:
        if outcome.deployed is not None:
            card = outcome.deployed.card
            text = f"{outcome.target.name}: {outcome.deployed.out} has {card.reason}"
            print(filled(text, console.width, indent="  "))
            for note in card.notes:
                print(filled(f"  note: {note}", console.width, indent="  "))
        if outcome.error is not None:
            print(filled(f"{outcome.target.name}: {outcome.error}", console.width, indent="  "))


def cells(card: ModelCard) -> tuple[str, ...]:
    """The cells of a bundle's row after its name."""
    memory, seconds = card.cost.memory_bytes, card.cost.seconds
    return (
        card.submodel,
        format_bytes(card.graph_bytes),
        *figures(card.quality),
        "unknown" if memory is None else format_bytes(memory),
        "" if seconds is None else format_seconds(seconds),
    )


def figures(quality: Quality | None) -> tuple[str, str]:
    """Accuracy and loss; empty if they are not known."""
    if quality is None:
        return "", ""
    accuracy = "" if quality.accuracy is None else f"{quality.accuracy:.2%}"
    return accuracy, f"{quality.loss:.4f}"
