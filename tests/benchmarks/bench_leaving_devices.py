"""What the global model loses while devices leave, join and are killed: five kinds on the digits.

Ten devices, two of each kind, train a small convolutional net (Dirichlet 0.5). It starts trained on
all their samples, so that few rounds are enough. From round STAY + 1 on, two devices leave before
each round, in an order that the seed draws, until only `cp` and `width` are left. In the last BACK
rounds a `full` and a `low-rank` device are back. In all of these rounds a device is killed with the
probability KILLED, so that its update is lost. Every case has the same data, first model and
events.

    python tests/benchmarks/bench_leaving_devices.py [SEED ...]
"""

import copy
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import edgetailor as et
from device_agent.formats.atomic_files import write_folder
from toolkit.demo.digits_data import Samples, digits, split_samples
from toolkit.model_evaluation import take_statistics
from toolkit.models.digits_cnn import Unit
from toolkit.submodels import global_model

STAY, ALONE, BACK, KILLED = 4, 5, 2, 0.2
"""Rounds of all devices, of `cp` and `width` alone, and with devices that are back."""
MODEL, SHAPE = "bench_leaving_devices:small_cnn", (1, 8, 8)
TRAINING = et.TrainingConfig(batch_size=16, learning_rate=0.05)
EARLIER = "penalty=15,personal-steps=1,factor-steps=5"
LEAVING = ("full", "low-rank:0.5", "slice:1")
CASES = {
    "earlier cp constants": (f"cp:2.0,{EARLIER}", "width:0.5"),
    "defaults": ("cp:2.0", "width:0.5"),
    "personal-start=aggregate": ("cp:2.0,personal-start=aggregate", "width:0.5"),
    "scaler=on": ("cp:2.0", "width:0.5,scaler=on"),
}
Fleet = list[int]


def small_cnn() -> torch.nn.Sequential:
    """Two convolutions with batch norm and a classifier: 5,210 parameters."""
    pool = torch.nn.AdaptiveAvgPool2d(1)
    return torch.nn.Sequential(
        Unit(1, 16, 1), Unit(16, 32, 2), pool, torch.nn.Flatten(), torch.nn.Linear(32, 10)
    )


def events(seed: int) -> Iterator[Fleet]:
    """The devices whose updates arrive, by round. Devices 2k and 2k + 1 are of kind k."""
    draw = np.random.default_rng([seed, 1])
    members = list(range(10))
    leaving = draw.permutation(2 * len(LEAVING)).reshape(-1, 2).tolist()
    for _ in range(STAY):
        yield members
    for number in range(len(leaving) + ALONE - 1 + BACK):
        if number < len(leaving):
            members = [device for device in members if device not in leaving[number]]
        elif number == len(leaving) + ALONE - 1:
            members = [0, 2, *members]
        arrived = [device for device in members if draw.random() >= KILLED]
        yield arrived or members


def trained(x: np.ndarray, y: np.ndarray, seed: int) -> et.GlobalModel:
    """The first model, after ten epochs on all samples of the devices."""
    torch.manual_seed(seed)
    model = small_cnn()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
    for batch in torch.randperm(len(y)).repeat(10).split(32):
        optimizer.zero_grad()
        output = model(torch.from_numpy(x)[batch])
        torch.nn.functional.cross_entropy(output, torch.from_numpy(y)[batch]).backward()
        optimizer.step()
    return global_model.from_model(model)


class Simulation:
    """All cases in one folder; graphs of a submodel are made once for all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.federation = et.Federation(MODEL, SHAPE, TRAINING)

    def run(self, kinds: tuple[str, ...], seed: int, name: str) -> list[tuple[float, float]]:
        """Accuracy after every round: with the averaged statistics, and with re-estimated ones."""
        data = digits()
        held, parts = split_samples(data.y, 2 * len(kinds), 0.2, 0.5, seed)
        local = data[np.concatenate(parts)]
        self.federation.load(trained(local.x, local.y, seed).save())
        accuracies = []
        for round_, fleet in enumerate(events(seed), 1):
            for spec in {kinds[device // 2] for device in fleet}:
                files = self.federation.bundle(spec, round_)
                write_folder(self.folder / spec, files, force=True)
            updates = []
            for device in fleet:
                update = self.folder / "update" / str(device)
                et.train(
                    self.folder / kinds[device // 2],
                    (data.x[parts[device]], data.y[parts[device]]),
                    update,
                    personal=self.folder / f"{name} {seed} {device}.safetensors",
                    threads=1,
                    seed=1000 * seed + round_,
                    force=True,
                )
                updates.append(et.read_update(update))
            self.federation.fold(updates)
            accuracies.append(self.accuracies(data[held], local.x))
        return accuracies

    def accuracies(self, held_out: Samples, x: np.ndarray) -> tuple[float, float]:
        """On held-out samples, before and after batch norm's statistics are those of `x`."""
        averaged, _ = self.federation.evaluate(held_out.x, held_out.y)
        module = copy.deepcopy(self.federation.module)
        take_statistics(module, x)
        again = et.evaluate(module, held_out.x, held_out.y).accuracy
        assert averaged is not None
        assert again is not None
        return averaged, again


def main(*seeds: str) -> None:
    """Print one row for each case and seed: each cell is averaged, then re-estimated."""
    torch.set_num_threads(1)
    print("| case | seed | before | lowest after | at the end |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        simulation = Simulation(Path(folder))
        for name, two in CASES.items():
            for seed in map(int, seeds or ("0", "1", "2")):
                accuracies = np.array(simulation.run((*LEAVING, *two), seed, name))
                cells = accuracies[STAY - 1], accuracies[STAY:].min(0), accuracies[-1]
                shown = (f"{averaged:.3f}, {again:.3f}" for averaged, again in cells)
                print(f"| {name} | {seed} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
