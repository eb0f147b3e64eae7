"""A federation of digits whose rounds are over, made without devices: trained in plain PyTorch."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from bundles import once
from device_agent.formats.protocol.fleet import FederatedEvaluation, KindEvaluation, RoundResult
from edgetailor import load_model
from oracles import descend
from toolkit.coordinator.database.key_log import KEY
from toolkit.coordinator.devices.coordinator_key import CoordinatorKey
from toolkit.coordinator.storage.coordinator_store import Store
from toolkit.simulation.digits import digits
from toolkit.submodels.global_model import from_model

MODEL = "toolkit.models:digits_cnn"
HELD_OUT = 360
FILE, WEIGHTS = "federation.toml", "w.safetensors"
CONFIG = f"""
model = "{MODEL}"
input_shape = [1, 8, 8]
rounds = 2
held_out = "held_out.npz"

[[devices]]
name = "desktop"
submodel = "full"

[[devices]]
name = "board"
submodel = "low-rank:0.5"

[[devices]]
name = "sensor"
submodel = "slice:units.2"
count = 2

[[devices]]
name = "phone"
submodel = "cp:2.0"

[[devices]]
name = "planned"
submodel = "auto"
memory = "61MB"
"""


JUDGED = FederatedEvaluation(
    round=2, devices=12, samples=96, counted=96, correct=90, accuracy=0.9375, loss=0.2,
    trained_accuracy=None, trained_loss=None, mean_accuracy=0.9, mean_loss=0.25,
    worst_accuracy=0.75, worst_loss=0.8, kinds={"board": KindEvaluation(
        devices=4, samples=30, counted=30, correct=24, accuracy=0.8, loss=0.5,
        trained_accuracy=None, trained_loss=None,
    )},
)  # fmt: skip
"""How the devices judge the model of round 1."""


def train(model: nn.Module, x: np.ndarray, y: np.ndarray, epochs: int = 8) -> nn.Module:
    """Train a model in plain PyTorch; the batches do not depend on the seed of the run.

    After four epochs the accuracy still changes by rounding errors, such as those of processors.
    """
    order = np.random.default_rng(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.train()
    for _ in range(epochs):
        for batch in np.array_split(order.permutation(len(y)), len(y) // 32):
            loss = nn.functional.cross_entropy(
                model(torch.from_numpy(x[batch])), torch.from_numpy(y[batch])
            )
            descend(optimizer, loss)
    return model.eval()


def split_digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """The digits to train on, and those that are held out, as (x, y)."""
    x, y = digits()
    order = np.random.default_rng(0).permutation(len(y))
    held_out, rest = order[:HELD_OUT], order[HELD_OUT:]
    return (x[rest], y[rest]), (x[held_out], y[held_out])


def write_federation(folder: Path) -> None:
    """Write the federation's file, its samples, its state after two rounds, and the best model."""
    folder.mkdir()
    (x, y), (held_x, held_y) = split_digits()
    np.savez(folder / "held_out.npz", x=held_x, y=held_y)
    (folder / FILE).write_text(CONFIG)
    store = Store(folder / "state", 1)
    model = load_model(MODEL, seed=1)
    first = from_model(model).save()
    trained = from_model(train(model, x, y)).save()
    (folder / WEIGHTS).write_bytes(trained)
    for round_, accuracy, content in ((0, 0.1, first), (1, 0.97, trained), (2, 0.1, first)):
        result = RoundResult(round=round_, accuracy=accuracy, loss=1.0, updates=3 * (round_ > 0))
        # The devices judge the model that they received: that of the round before.
        store.add_result(result, content, JUDGED if round_ == 2 else None)
    store.close()
    (folder / "state" / KEY).write_bytes(CoordinatorKey().pem())


def federation(factory: pytest.TempPathFactory) -> Path:
    """The folder of the federation; read it only. Round 1 is the best."""
    return once(factory, "digits-federation", write_federation)
