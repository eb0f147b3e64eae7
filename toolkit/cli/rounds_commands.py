"""`edgetailor rounds`, `export-model` and `rollback`: the models of a federation's rounds."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from toolkit.terminal_output import print_table, table

if TYPE_CHECKING:
    from toolkit.coordinator.storage.saved_rounds import SavedRound

FOLDER = click.Path(path_type=Path)


@click.command()
@click.argument("state", type=FOLDER)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def rounds(state: Path, as_json: bool) -> None:
    """List the rounds of the federation in STATE.

    Shows the quality of the global model after each round and whether that model is kept (`keep`
    in the federation's file). Round 0 is the model before training.
    """
    from toolkit.coordinator.storage.saved_rounds import saved_rounds

    rounds = saved_rounds(state)
    if as_json:
        document = {"version": 1, "rounds": [asdict(saved) for saved in rounds]}
        click.echo(json.dumps(document, indent=1))
        return
    shown = table("round", "accuracy", "loss", "updates", "model", "note")
    shown.columns[-1].justify = "left"
    for saved in rounds:
        shown.add_row(
            str(saved.round),
            "" if saved.accuracy is None else f"{saved.accuracy:.2%}",
            f"{saved.loss:.4f}",
            str(saved.updates),
            "lost" if saved.lost else saved.model[:12] if saved.kept else "not kept",
            ", ".join(_notes(saved)),
        )
    print_table(shown)


def _notes(saved: "SavedRound") -> list[str]:
    notes = ["best"] if saved.best else []
    if saved.current:
        notes.append("current")
    if saved.started_from is not None and saved.started_from != saved.round - 1:
        notes.append(f"from round {saved.started_from}")
    return notes


@click.command()
@click.argument("state", type=FOLDER)
@click.argument("round_", metavar="ROUND", type=click.IntRange(min=0))
@click.argument("out", type=FOLDER)
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
def export_model(state: Path, round_: int, out: Path, force: bool) -> None:
    """Write the global model after ROUND to OUT (.safetensors).

    STATE is the state folder of the federation; `edgetailor serve` may run on it.
    """
    from toolkit.coordinator.storage.saved_rounds import export_model as export

    export(state, round_, out, force)
    click.echo(f"{out} holds the global model after round {round_}.", err=True)


@click.command()
@click.argument("state", type=FOLDER)
@click.argument("round_", metavar="ROUND", type=click.IntRange(min=0))
def rollback(state: Path, round_: int) -> None:
    """Let the next round start from the model after ROUND.

    Stop `edgetailor serve` first. Later rounds stay in the list, and the next round's number
    follows theirs. Updates that the open round has received are discarded: their devices train
    again.
    """
    from toolkit.coordinator.storage.recoverable import MODEL
    from toolkit.coordinator.storage.saved_rounds import roll_back

    number = roll_back(state, round_)
    click.echo(
        f"Round {number} starts from the model of round {round_}, which {MODEL} now holds. If "
        "all `rounds` of the federation's file are over, set a higher number.",
        err=True,
    )
