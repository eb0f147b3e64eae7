"""What all peers train: the data of each client, the model's file, and the first weights."""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from mobilenet import MobileNet
from safetensors.torch import save_file
from torch import Tensor, nn

from toolkit.models.digits_cnn import DigitsCNN
from toolkit.models.resnet20 import ResNet20
from toolkit.simulation.datasets import read_dataset
from toolkit.simulation.digits import digits

CLIENTS, SAMPLES, HELD_OUT, SEED = 8, 160, 500, 0
FASHION = Path("/usr/share/datasets/fashion-mnist")
BATCH, EPOCHS, RATE, MOMENTUM = 32, 2, 0.05, 0.9


def fashion() -> tuple[np.ndarray, np.ndarray]:
    """Pictures (n, 1, 28, 28) of Debian's package dataset-fashion-mnist."""
    train, _ = read_dataset("mnist", FASHION, (1, 28, 28))
    return train.x, train.y


@dataclass(frozen=True)
class Problem:
    """A model, and what its clients train it on.

    `net.py` in the folder of a run holds the model's source and `Net`, its class.
    """

    model: type[nn.Module]
    data: Callable[[], tuple[np.ndarray, np.ndarray]]
    rounds: int
    channels: str = ""

    def write(self, folder: Path) -> None:
        """Write net.py, held_out.npz, site-1.npz to site-8.npz, start.pt and start.safetensors."""
        source = inspect.getsource(inspect.getmodule(self.model) or self.model)
        (folder / "net.py").write_text(
            f"{source}\n\nclass Net({self.model.__name__}):\n"
            f"    def __init__(self) -> None:\n        super().__init__({self.channels})\n"
        )
        x, y = self.data()
        order = np.random.default_rng(SEED).permutation(len(x))
        parts = {"held_out": order[:HELD_OUT]}
        for number in range(CLIENTS):
            first = HELD_OUT + number * SAMPLES
            parts[f"site-{number + 1}"] = order[first : first + SAMPLES]
        for name, chosen in parts.items():
            np.savez(folder / f"{name}.npz", x=x[chosen], y=y[chosen])
        torch.manual_seed(SEED)
        state = self.net().state_dict()
        torch.save(state, folder / "start.pt")
        save_file(state, folder / "start.safetensors")
        (folder / "shape.json").write_text(json.dumps(self.shape()))

    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return self.data()[0].shape[1:]

    def net(self) -> nn.Module:
        return self.model(**({"channels": 1} if self.channels else {}))

    def accuracy(self, folder: Path, weights: Mapping[str, Tensor]) -> float:
        """Share of the held-out pictures that the model with `weights` recognises."""
        model = self.net().eval()
        model.load_state_dict(dict(weights))
        with np.load(folder / "held_out.npz") as file, torch.no_grad():
            found = model(torch.from_numpy(file["x"])).argmax(1).numpy()
            return float(np.mean(found == file["y"]))


PROBLEMS = {
    "digits_cnn": Problem(DigitsCNN, digits, 5),
    "resnet20": Problem(ResNet20, fashion, 3, "channels=1"),
    "mobilenet": Problem(MobileNet, fashion, 3, "channels=1"),
}
