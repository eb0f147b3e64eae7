"""The training of one round without a federation, in the environment of a peer.

    python local_training.py torch | edgetailor | retired FOLDER

Prints processor seconds (the median of RUNS trainings after the first, each of EPOCHS epochs) and
the peak memory of the process in bytes.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

BATCH, EPOCHS, RATE, MOMENTUM, RUNS = 32, 2, 0.05, 0.9, 5


def with_torch(folder: Path) -> Callable[[], object]:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    sys.path.insert(0, str(folder))
    from net import Net

    torch.set_num_threads(1)
    with np.load(folder / "site-1.npz") as file:
        samples = TensorDataset(torch.from_numpy(file["x"]), torch.from_numpy(file["y"]))

    def train() -> None:
        model, loss = Net(), torch.nn.CrossEntropyLoss()
        model.load_state_dict(torch.load(folder / "start.pt"))
        optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM)
        for _ in range(EPOCHS):
            for x, y in DataLoader(samples, BATCH, shuffle=True):
                optimizer.zero_grad()
                loss(model(x), y).backward()
                optimizer.step()

    return train


def with_edgetailor(folder: Path) -> Callable[[], object]:
    from device_agent.training.standalone_training import train

    def once() -> None:
        train(folder / "bundle", folder / "site-1.npz", folder / "update", threads=1, force=True)

    return once


def with_retired(folder: Path) -> Callable[[], object]:
    """onnxruntime-training, which has no momentum."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from retired_step import retired

    step, steps = retired(str(folder / "retired.onnx"), 1), EPOCHS * 160 // BATCH

    def train() -> None:
        for _ in range(steps):
            step()

    return train


PEERS = {
    "torch": with_torch,
    "edgetailor": with_edgetailor,
    "retired": with_retired,
}


def main(peer: str, folder: Path) -> None:
    train, seconds = PEERS[peer](folder), []
    for _ in range(RUNS + 1):
        begin = time.process_time()
        train()
        seconds.append(time.process_time() - begin)
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(line for line in lines if line.startswith("VmHWM")).split()[1]
    print(statistics.median(seconds[1:]), int(peak) * 1024)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
