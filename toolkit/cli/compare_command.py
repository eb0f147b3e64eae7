"""`edgetailor compare`: a table and curves of simulations."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from device_agent.cli.console import print_json
from toolkit.cli.options import Choice

if TYPE_CHECKING:
    from toolkit.simulation.comparison import Row


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--by",
    type=Choice(["class", "device"]),
    help="Also compare the last rounds: the accuracy of each class, or the figures on devices.",
)
@click.option(
    "--curves",
    type=click.Path(path_type=Path),
    help="Write the curves, by round, by bytes and by simulated time, to this PNG.",
)
@click.option(
    "--last",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Show the mean of this many last rounds, because single rounds vary much.",
)
@click.option(
    "--target",
    type=float,
    help="Show the rounds, bytes and simulated time until this accuracy, such as 0.9; for a "
    "regression, until this loss. The curves show it as a dashed line.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def compare(
    runs: Sequence[Path],
    by: str | None,
    curves: Path | None,
    last: int,
    target: float | None,
    as_json: bool,
) -> None:
    """Compare simulations by their folders RUN.

    Runs that differ only in their seeds are one row, with means and sample standard deviations.
    `final` and `best` are accuracies of the global model (losses of a regression). `own` is the
    accuracy of the clients' own models after training, on the samples that `validation` holds out.
    `sent` counts the bytes in both directions. `time` is how long the simulation took. `simulated`
    is how long the rounds would take on devices with a `profile`. With profiles, `a day` is what a
    device receives and sends in a day, on average over all devices, if rounds follow without a
    pause; `memory` is the most that a device may need. For a regression the table also
    shows `RMSE` and `MAE` of the last round. If the loss has metrics, the table shows them too.

    --by device shows how the clients of the last round judge the global model that they received,
    the result of the previous round. This needs a table [evaluation] in the federation's file.
    """
    from toolkit.cli.printed.comparison_table import (
        show_by_class,
        show_by_device,
        show_comparison,
    )
    from toolkit.simulation.comparison import compare as read
    from toolkit.simulation.curves import draw_comparison

    rows = read(runs)
    if curves is not None:
        draw_comparison(rows, curves, target)
    if as_json:
        document = {"version": 1, "runs": [_as_object(row, last, target) for row in rows]}
        print_json(msgspec.json.encode(document))  # null in place of NaN and infinity
        return
    show_comparison(rows, last, target)
    if by == "class":
        show_by_class(rows)
    elif by == "device":
        show_by_device(rows)


def _as_object(row: "Row", last: int, target: float | None) -> dict[str, object]:
    further, kind = row.further, "loss" if row.judged_by_loss else "accuracy"
    reached = None if target is None else row.reaching(target)
    values = {
        f"final_{kind}": row.final,
        f"best_{kind}": row.best,
        f"last_{kind}": row.mean_of_last(last),
        "rmse": further.pop("RMSE", None),
        "mae": further.pop("MAE", None),
        "own_accuracy": row.own_models,
        "bytes": row.sent,
        "seconds": row.seconds,
        "simulated_s": row.simulated_s,
        "bytes_per_device_and_day": row.traffic,
        "rounds_to_target": reached and reached.rounds,
        "bytes_to_target": reached and reached.sent,
        "simulated_s_to_target": reached and reached.simulated_s,
    }
    return {
        "name": row.name,
        "folders": [str(folder) for folder in row.folders],
        "rounds": [len(history) for history in row.histories],
        **{key: value and value._asdict() for key, value in values.items()},
        "metrics": {name: value._asdict() for name, value in further.items()} or None,
        "memory_bytes": row.memory,
        "classes": row.classes,
        "devices": row.devices,
    }
