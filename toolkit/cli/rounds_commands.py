"""`edgetailor rounds`, `export-model` and `rollback`: the models of a federation's rounds."""

import json
from dataclasses import asdict
from pathlib import Path

import click

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

    found = saved_rounds(state)
    if as_json:
        document = {"version": 1, "rounds": [asdict(one) for one in found]}
        click.echo(json.dumps(document, indent=1))
        return
    from toolkit.cli.printed.rounds_table import show_rounds

    show_rounds(found)


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

    Stop `edgetailor serve` first. The rounds since then stay listed; their number counts on.
    Updates that the open round has received are discarded: their devices train it again.
    """
    from toolkit.coordinator.storage.recoverable import MODEL
    from toolkit.coordinator.storage.rollback import roll_back

    number = roll_back(state, round_)
    click.echo(
        f"Round {number} starts from the model of round {round_}, which {MODEL} now is. If all "
        "`rounds` of the federation's file are over, set a higher number.",
        err=True,
    )
