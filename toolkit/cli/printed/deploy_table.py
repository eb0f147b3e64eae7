"""Prints the result of `edgetailor deploy`: a row for each bundle, then why it got its submodel."""

from collections.abc import Sequence

from rich.console import Console

from device_agent.formats.protocol.fleet import further_figures, further_text
from exporters.programs.output_parts import described_parts
from profiles.text_formatting import format_bytes, format_seconds
from toolkit.deployment.card_fields import ModelCard
from toolkit.deployment.card_markdown import device_text
from toolkit.deployment.deploy_targets import Outcome
from toolkit.terminal_output import filled, table


def show_deployed(outcomes: Sequence[Outcome]) -> None:
    """Print a row for each bundle, the reasons for submodels, and the errors of failed bundles."""
    cards = [outcome.deployed.card for outcome in outcomes if outcome.deployed is not None]
    names = list(dict.fromkeys(name for card in cards for name in further_figures(card.quality)))
    known = [cells(card, names) for card in cards]
    # A column without any value is left out.
    shown = (
        [name for name in known[0] if any(row[name] for row in known)] if known else ["submodel"]
    )
    rows = table("bundle", *shown)
    rows.columns[1].justify = "left"
    for outcome in outcomes:
        made = outcome.deployed
        row = {"submodel": "failed"} if made is None else cells(made.card, names)
        rows.add_row(outcome.target.name, *(row.get(name, "") for name in shown))
    console = Console(highlight=False)
    console.print(rows)
    if cards:
        print("memory: predicted for one sample, above the idle agent")
        if parts := cards[0].output.parts:
            print(filled(f"outputs: {described_parts(parts)}", console.width, indent="  "))
        if (whole := cards[0].global_quality) is not None:
            accuracy = "" if whole.accuracy is None else f"{whole.accuracy:.2%} accuracy, "
            text = f"{accuracy}loss {whole.loss:.4f}{further_text(whole)}"
            print(
                filled(f"the whole model in PyTorch, float32: {text}", console.width, indent="  ")
            )
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


def cells(card: ModelCard, further: Sequence[str]) -> dict[str, str]:
    """The cells of a bundle's row, by column. `further` names the columns of metrics and errors."""
    memory, seconds, quality = card.cost.memory_bytes, card.cost.seconds, card.quality
    accuracy = None if quality is None else quality.accuracy
    known = further_figures(quality)
    return {
        "submodel": card.submodel,
        "graph": format_bytes(card.graph_bytes),
        "accuracy": "" if accuracy is None else f"{accuracy:.2%}",
        "loss": "" if quality is None else f"{quality.loss:.4f}",
        **{name: f"{known[name]:.4g}" if name in known else "" for name in further},
        "memory": "unknown" if memory is None else format_bytes(memory),
        "time": "" if seconds is None else format_seconds(seconds),
    }
