"""A federation whose operator has no labelled data: its devices judge the models.

    pip install 'edgetailor[toolkit]'
    python no_central_data.py work

Runs a coordinator and three devices as processes on this machine, for a minute. Each device has its
own samples of handwritten digits and keeps a fifth of them apart; of these, the coordinator gets
counts only. Then it deploys the model that the devices judge best, and a device predicts with it.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

FEDERATION = """
model = "toolkit.models:digits_cnn"   # there is no held_out: the coordinator has no samples
input_shape = [1, 8, 8]
rounds = 3
port = 0                              # a free one

[training]
epochs = 2
learning_rate = 0.1

[evaluation]
share = 0.2                           # of each device's samples, never trained on

[[devices]]
name = "board"
submodel = "full"
count = 3
"""
EDGETAILOR = [sys.executable, "-m", "toolkit.cli"]  # as the command `edgetailor`
AGENT = [sys.executable, "-m", "device_agent.cli"]  # as the command `edgetailor-agent`


def main(folder: Path) -> None:
    """Run the federation in the new folder `folder`, then deploy its model and predict."""
    folder.mkdir(parents=True)
    (folder / "federation.toml").write_text(FEDERATION)
    write_samples(folder)
    with coordinator(folder) as url:
        agents = []
        for number in range(3):
            device, token = f"device{number}", "state/tokens/board.token"
            own = ["--state", device]
            run(folder, *AGENT, "join", url, "--token-file", token, "--name", device, *own)
            command = [*AGENT, "run", "--data", f"{device}.npz", *own]
            agents.append(subprocess.Popen(command, cwd=folder))
        for agent in agents:
            agent.wait()
    run(folder, *EDGETAILOR, "rounds", "state")
    run(folder, *EDGETAILOR, "deploy", "federation.toml", "--out", "deployed")
    run(folder, *AGENT, "predict", "deployed/board", "--data", "new.npy")


def write_samples(folder: Path) -> None:
    """Write the samples of three devices, which have different digits, and five new samples."""
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    np.save(folder / "new.npy", x[:5])
    for number in range(3):
        own = np.flatnonzero(y[5:] % 3 != number) + 5
        np.savez(folder / f"device{number}.npz", x=x[own[number::3]], y=y[own[number::3]])


@contextmanager
def coordinator(folder: Path) -> Iterator[str]:
    """Run a coordinator during the block, and yield its address."""
    server = subprocess.Popen([*EDGETAILOR, "serve", "federation.toml"], cwd=folder)
    address = folder / "state" / "address"
    try:
        while not address.exists():
            if server.poll() is not None:
                sys.exit("The coordinator did not start.")
            time.sleep(0.1)
        yield address.read_text().strip()
    finally:
        server.terminate()
        server.wait()


def run(folder: Path, *command: str) -> None:
    """Run a command in `folder` and wait for its end."""
    subprocess.run(command, cwd=folder, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
