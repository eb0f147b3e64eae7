"""Flower's ServerApp: the rounds of a federation's file, with sites in place of devices."""

import json
from pathlib import Path

from flwr.app import Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from device_agent.formats.atomic_files import write_file
from toolkit.coordinator.federation_config import load_config
from toolkit.coordinator.federation_setup import federation
from toolkit.coordinator.round_worker import read_samples
from toolkit.flower.strategy import SitesStrategy

HISTORY = "history.jsonl"

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds of `federation`, a key of the run's configuration, and write into `out`.

    Each round gets a model and a line in `history.jsonl`: `round`, `sites` and `updates` that it
    has, `accuracy` and `loss` on the held-out samples. Round 0 is the model before the first.

    Further keys: `sites`, how many have to be connected before a round begins, and `timeout`, how
    long a site may take for a round, in seconds.
    """
    settings = context.run_config
    path, out = Path(str(settings["federation"])), Path(str(settings["out"]))
    config = load_config(path)
    model = federation(config)
    held_out = read_samples(
        config.held_out, config.input_shape, config.training.labels, preprocessing=config.data
    )
    timeout = float(settings["timeout"])
    strategy = SitesStrategy(model, str(context.run_id), int(settings["sites"]), timeout)

    out.mkdir(parents=True, exist_ok=True)

    def keep(round_: int, _: object) -> MetricRecord:
        """Write the global model of a round and evaluate it."""
        accuracy, loss = model.evaluate(*held_out)
        sites, updates = strategy.merged
        line = {"round": round_, "sites": sites, "updates": updates}
        with (out / HISTORY).open("a") as history:
            history.write(json.dumps({**line, "accuracy": accuracy, "loss": loss}) + "\n")
        write_file(out / f"round-{round_}.safetensors", model.save())
        return MetricRecord({"loss": loss} | ({} if accuracy is None else {"accuracy": accuracy}))

    strategy.start(grid, strategy.arrays(), config.rounds, timeout=timeout + 10.0, evaluate_fn=keep)
