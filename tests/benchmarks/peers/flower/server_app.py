"""The server in Flower: FedAvg over all clients, from given weights."""

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    folder, clients = context.run_config["folder"], int(context.run_config["clients"])
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
    start = ArrayRecord(torch.load(f"{folder}/start.pt"))
    result = strategy.start(grid, start, num_rounds=int(context.run_config["rounds"]))
    torch.save(result.arrays.to_torch_state_dict(), f"{folder}/result.pt")
