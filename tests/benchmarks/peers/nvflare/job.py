"""The job in NVFLARE: FedAvg over all clients, from given weights. `--export` writes its folder."""

import argparse

from net import Net
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("clients", type=int)
parser.add_argument("rounds", type=int)
given, _ = parser.parse_known_args()
recipe = FedAvgRecipe(
    name="peer",
    model=Net(),
    initial_ckpt=f"{given.folder}/start.pt",
    min_clients=given.clients,
    num_rounds=given.rounds,
    train_script="client.py",
    train_args=given.folder,
)
recipe.execute(SimEnv(num_clients=given.clients))
