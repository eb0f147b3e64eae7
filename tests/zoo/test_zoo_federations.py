"""Stock models learn in federations of devices with different submodels.

Three rounds of real bundles, trained by the agent in ONNX Runtime; the loss on held-out data falls.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from device_agent.formats.update import read_update
from edgetailor import Federation, TrainingConfig
from small_models import MISSING, MODELS, WORDS, SmallModel
from trainings import train_bundle
from zoo_models import CLASSES

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(MISSING), reason=f"the extra `zoo` is missing: {MISSING}"),
]

SPECS = {
    "full": "full",
    "low-rank": "low-rank:0.5,keep=0",
    "slice": "slice:0.6",
    "width": "width:0.5",
}
ROUNDS = 3
SAMPLES, HELD_OUT = 48, 100
# Batch norms of MobileNetV3 follow their statistics too slowly for three rounds.
TRAINING = TrainingConfig(
    batch_size=8, epochs=3, learning_rate=0.003, optimizer="adam", batch_norm="static"
)
CLEARLY = 0.9
"""The share of its first value below which the loss has to fall."""

Data = tuple[np.ndarray, np.ndarray]


class Task:
    """Samples that tell their labels: a pattern of their class with noise, or a rule of tokens."""

    def __init__(self, model: SmallModel, seed: int) -> None:
        self.model = model
        self.draw = np.random.default_rng(seed)
        self.patterns = self.draw.normal(size=(CLASSES, *model.shape))

    def samples(self, count: int) -> Data:
        """Draw `count` samples and their labels."""
        size = (count, *self.model.shape)
        if self.model.labels:  # each token's label is the next number
            x = self.draw.integers(1, 8, size=size)
            return x, x + 1
        y = self.draw.integers(CLASSES, size=count)
        if self.model.tokens:  # half of the tokens are of the class, the others any
            own = 1 + y[:, None] + CLASSES * self.draw.integers(3, size=size)
            other = self.draw.integers(1, WORDS, size=size)
            return np.where(self.draw.random(size) < 0.5, own, other), y
        noise = self.draw.normal(0, 0.5, size)
        return (self.patterns[y] + noise).astype(np.float32), y


def federation_of(task: Task, seed: int) -> Federation:
    """A federation of the task's model."""
    model = task.model
    x, _ = task.samples(HELD_OUT)
    return Federation(f"small_models:{model.name}", model.shape, TRAINING, seed=seed, statistics=x)


def losses(federation: Federation, specs: list[str], task: Task, folder: Path) -> Iterator[float]:
    """The loss on held-out data before the first round and after every round."""
    x, y = task.samples(HELD_OUT)
    data = []
    for number in range(len(specs)):
        data.append(str(folder / f"{number}.npz"))
        own, labels = task.samples(SAMPLES)
        np.savez(data[-1], x=own, y=labels)
    yield federation.evaluate(x, y)[1]
    for round_ in range(1, ROUNDS + 1):
        updates = []
        for number, spec in enumerate(specs):
            device_folder = folder / f"{round_}-{number}"
            bundle = device_folder / "bundle"
            bundle.mkdir(parents=True)
            for name, content in federation.bundle(spec, round_).items():
                (bundle / name).write_bytes(content)
            train_bundle(bundle, data[number], device_folder / "update", threads=1, seed=number)
            updates.append(read_update(device_folder / "update"))
        federation.fold(updates)
        yield federation.evaluate(x, y)[1]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_loss_falls(model: SmallModel, seed: int, tmp_path: Path) -> None:
    task = Task(model, seed)
    federation = federation_of(task, seed)
    specs = list(SPECS.values())
    first, *_, last = losses(federation, specs, task, tmp_path)
    assert last < CLEARLY * first, f"{model.name}: {first:.3f} before, {last:.3f} after"
