"""Flower's ServerApp. It runs the rounds of a federation's file with sites instead of devices."""

import json
from pathlib import Path

from flwr.app import Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from device_agent.formats.atomic_files import write_file
from profiles.errors import InputError
from toolkit.aggregation.running_aggregation import check_rule
from toolkit.coordinator.federation_file.load_config import load_config
from toolkit.coordinator.federation_setup import federation, own_samples
from toolkit.flower.dense_rounds import DenseRounds
from toolkit.flower.settings import read_settings
from toolkit.flower.strategy import SitesStrategy

HISTORY = "history.jsonl"

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds of the federation that the run's configuration names.

    Each round writes its model and a line in `history.jsonl`: `round`, the number of `sites`, and
    `accuracy` and `loss` on the held-out samples. With partial aggregates the line also has the
    number of `updates`, and with noise the `epsilon` spent so far. Round 0 is the initial model.

    Raises InputError if the configuration or the file cannot be used.
    """
    settings = read_settings(context.run_config)
    out, run = Path(settings.out), str(context.run_id)
    config = load_config(Path(settings.federation))
    check_rule(config.aggregation)
    if config.held_out is None:
        raise InputError(
            "{path} has no `held_out`, so nobody would judge the models of Flower's server. Set "
            "`held_out` to samples of your own.",
            code="federation.not-judged",
            path=settings.federation,
        )
    if config.last_round is None:
        raise InputError(
            '{path}: rounds = "{rounds}" has no last round, and a run of Flower needs one. Set '
            "`rounds` to a number.",
            code="federation.endless-run",
            path=settings.federation,
            rounds=config.rounds,
        )
    # Without kinds of devices the model is not split, because the server needs no submodel.
    # Splitting records the model, which fails if one of Flower's threads draws a random number.
    model = federation(config.model_copy(update={"devices": ()}))
    held_out = own_samples(config, config.held_out)
    out.mkdir(parents=True, exist_ok=True)

    def keep(round_: int, columns: dict[str, float]) -> MetricRecord:
        """Write the global model of a round and evaluate it."""
        accuracy, loss = model.evaluate(*held_out)
        line = {"round": round_, **columns, "accuracy": accuracy, "loss": loss}
        with (out / HISTORY).open("a") as history:
            history.write(json.dumps(line) + "\n")
        write_file(out / f"round-{round_}.safetensors", model.save())
        return MetricRecord({"loss": loss} | ({} if accuracy is None else {"accuracy": accuracy}))

    if settings.dense:
        DenseRounds(model, settings, run, config.last_round, keep).start(grid, context)
        return
    strategy = SitesStrategy(model, run, settings.sites, settings.timeout)
    strategy.start(
        grid,
        strategy.arrays(),
        config.last_round,
        timeout=settings.timeout + 10.0,
        evaluate_fn=lambda round_, _: keep(round_, strategy.columns()),
    )
