"""`edgetailor rounds`, `export-model` and `rollback`: the models of a federation's rounds."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from device_agent.formats.protocol.fleet import further_figures
from toolkit.terminal_output import filled, print_table, table

if TYPE_CHECKING:
    from device_agent.formats.protocol.fleet import FederatedEvaluation
    from toolkit.coordinator.storage.saved_rounds import SavedRound

FOLDER = click.Path(path_type=Path)


@click.command()
@click.argument("state", type=FOLDER)
@click.option(
    "--round",
    "round_",
    type=click.IntRange(min=0),
    help="Show one round: by class, by kind and by device.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def rounds(state: Path, round_: int | None, as_json: bool) -> None:
    """List the rounds of a federation.

    STATE is the federation's state folder or its file; `edgetailor serve` may run on it.

    The list shows the quality of the global model after each round, and whether that model is kept
    (`keep` in the federation's file). If the loss has metrics, the list shows them too. Round 0 is
    the model before training.

    If devices judge the models, there are three more figures: `devices` of all devices, `worst` of
    the worst tenth of the devices, and `trained` of their own models after the local training of
    the next round. These figures are accuracies, or losses of a regression. With --round the
    figures are also listed by kind and by device. Figures by device are kept for the last three
    rounds.
    """
    from toolkit.cli.printed.round_details import worst_classes
    from toolkit.coordinator.federation_source import state_folder
    from toolkit.coordinator.storage.saved_rounds import compared_by, known_round, saved_rounds

    state = state_folder(state)
    rounds = saved_rounds(state)
    if round_ is not None:
        _one_round(state, known_round(rounds, round_, state), as_json)
        return
    if as_json:
        document = {"version": 1, "rounds": [asdict(saved) for saved in rounds]}
        click.echo(json.dumps(document, indent=1))
        return
    held_out = any(saved.loss is not None for saved in rounds)
    judged = any(saved.devices is not None for saved in rounds) or not held_out
    central = list(dict.fromkeys(name for saved in rounds for name in _central(saved)))
    columns = [*central, *(["devices", "worst", "trained"] if judged else [])]
    # With more figures, the table would be wider than 80 columns.
    digits = 12 if len(columns) <= 3 else 8
    shown = table("round", *columns, "updates", "model", "note")
    shown.columns[-1].justify = "left"
    for saved in rounds:
        shown.add_row(
            str(saved.round),
            *(_central(saved).get(name, "") for name in central),
            *(_judgement(saved.devices) if judged else []),
            str(saved.updates) if saved.asked is None else f"{saved.updates} of {saved.asked}",
            "lost" if saved.lost else saved.model[:digits] if saved.kept else "not kept",
            ", ".join(_notes(saved)),
        )
    print_table(shown)
    for saved in rounds:
        for change in saved.changes:
            click.echo(filled(f"Round {saved.round} began with {change}", 80, "  "))
    if (figure := compared_by(state)) is not None:
        click.echo(f"The best round has the best {figure}.")
    for line in (line for saved in rounds if saved.current for line in worst_classes(saved)):
        click.echo(line)


def _one_round(state: Path, saved: "SavedRound", as_json: bool) -> None:
    """Print one round by class, kind and device."""
    from toolkit.cli.printed.round_details import show_round
    from toolkit.coordinator.storage.judging_devices import judging_devices

    devices = judging_devices(state, saved.round)
    if as_json:
        by_device = [asdict(device) for device in devices]
        document = {"version": 1, "round": asdict(saved), "by_device": by_device}
        click.echo(json.dumps(document, indent=1))
    else:
        show_round(saved, devices)


def _central(saved: "SavedRound") -> dict[str, str]:
    """The figures on held-out data: accuracy, loss and metrics, or the errors of a regression."""
    figures = {} if saved.accuracy is None else {"accuracy": f"{saved.accuracy:.2%}"}
    further = further_figures(saved.held_out)
    if saved.loss is not None and "RMSE" not in further:
        figures["loss"] = f"{saved.loss:.4f}"
    return figures | {name: f"{value:.4g}" for name, value in further.items()}


def _judgement(judged: "FederatedEvaluation | None") -> list[str]:
    """The figures of all devices, of their worst tenth, and after local training."""
    if judged is None:
        return ["", "", ""]
    accuracies = judged.accuracy, judged.worst_accuracy, judged.trained_accuracy
    losses = judged.loss, judged.worst_loss, judged.trained_loss
    if judged.accuracy is None:
        return ["" if loss is None else f"{loss:.4f}" for loss in losses]
    return ["" if share is None else f"{share:.1%}" for share in accuracies]


def _notes(saved: "SavedRound") -> list[str]:
    notes = ["best"] if saved.best else []
    if saved.current:
        notes.append("current")
    if saved.started_from is not None and saved.started_from != saved.round - 1:
        notes.append(f"from round {saved.started_from}")
    if saved.left_out:
        notes.append(f"{len(saved.left_out)} left out")
    if saved.limited:
        notes.append(f"{len(saved.limited)} limited")
    return notes


@click.command()
@click.argument("state", type=FOLDER)
@click.argument("round_", metavar="ROUND", type=click.IntRange(min=0))
@click.argument("out", type=FOLDER)
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
def export_model(state: Path, round_: int, out: Path, force: bool) -> None:
    """Write the model after ROUND to OUT (.safetensors).

    STATE is the state folder of the federation or its file; `edgetailor serve` may run on it.
    """
    from toolkit.coordinator.federation_source import state_folder
    from toolkit.coordinator.storage.saved_rounds import export_model as export

    export(state_folder(state), round_, out, force)
    click.echo(f"{out} contains the global model after round {round_}.", err=True)


@click.command()
@click.argument("state", type=FOLDER)
@click.argument("round_", metavar="ROUND", type=click.IntRange(min=0))
def rollback(state: Path, round_: int) -> None:
    """Let the next round start from the model after ROUND.

    STATE is the state folder of the federation or its file. Stop `edgetailor serve` first. Later
    rounds stay in the list, and the next round's number follows theirs. Updates that the open round
    has received are discarded: their devices train again.
    """
    from toolkit.coordinator.federation_source import state_folder
    from toolkit.coordinator.storage.recoverable import MODEL
    from toolkit.coordinator.storage.saved_rounds import roll_back

    number = roll_back(state_folder(state), round_)
    click.echo(
        f"Round {number} starts from the model of round {round_}, which is now in {MODEL}. If all "
        "`rounds` of the federation's file are over, set a higher number. If they ended early, "
        "change `early_stopping`.",
        err=True,
    )
