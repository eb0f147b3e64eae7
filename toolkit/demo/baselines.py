"""The demo's two baselines: a fleet of full models, and devices that train alone.

Both run in one process without a network, on the bundles and with the training code that agents
use. Run it as `python -m toolkit.demo.baselines FOLDER ROUNDS SEED FULL_TOO`; it prints one JSON
object.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from device_agent.formats.update import read_update
from device_agent.training.bundle_training import train_bundle
from device_agent.training.training_options import TrainingOptions
from profiles.errors import UpdateError
from toolkit.aggregation.aggregate import Received
from toolkit.aggregation.federation import Federation
from toolkit.demo import demo_settings
from toolkit.demo.demo_folder import DemoFolder

SUBMODEL = "full"
"""Devices on their own train the whole model, which favours them in the comparison."""


@dataclass(frozen=True)
class Baselines:
    """Held-out accuracies from round 0 (before training) on, from 0 to 1.

    Attributes:
        all_full: Of the global model when every device trains the full model; None if the demo's
            own fleet does that.
        alone: By device: of its own model, trained on its own data only.
    """

    all_full: tuple[float, ...] | None
    alone: Mapping[str, tuple[float, ...]]

    @property
    def alone_range(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """By round: the lowest accuracy of a device alone, the mean, and the highest."""
        found = np.array(list(self.alone.values()))
        return found.min(axis=0), found.mean(axis=0), found.max(axis=0)


def read_baselines(path: Path) -> Baselines:
    """Read the document that this module prints."""
    document = json.loads(path.read_text(encoding="utf-8"))
    full = document["all_full"]
    return Baselines(
        None if full is None else tuple(full),
        {name: tuple(curve) for name, curve in document["alone"].items()},
    )


def train_baselines(
    held_out: Path, data: Mapping[str, Path], rounds: int, seed: int, full_too: bool
) -> Baselines:
    """Train both baselines.

    Args:
        held_out: The `.npz` file that models are judged on.
        data: The local data of each device, by its name.
        rounds: How many rounds to train.
        seed: Seed of the initial model and of the training.
        full_too: Whether to train the fleet of full models.

    Returns:
        The accuracies of each round.
    """
    federation = Federation(
        demo_settings.MODEL, demo_settings.INPUT_SHAPE, demo_settings.TRAINING, seed=seed
    )
    start = federation.save()

    def accuracies(files: Sequence[Path]) -> tuple[float, ...]:
        federation.load(start)
        with tempfile.TemporaryDirectory() as scratch:
            return tuple(_rounds(federation, files, held_out, rounds, seed, Path(scratch)))

    return Baselines(
        all_full=accuracies(list(data.values())) if full_too else None,
        alone={name: accuracies([file]) for name, file in data.items()},
    )


def _rounds(
    federation: Federation,
    files: Sequence[Path],
    held_out: Path,
    rounds: int,
    seed: int,
    scratch: Path,
) -> Iterator[float]:
    """Accuracy of the model that the data `files` train together, round by round.

    A federation of one device is that device alone: the mean of one update is the update.
    """
    yield _accuracy(federation, held_out)
    for round_ in range(1, rounds + 1):
        bundle = scratch / f"bundle-{round_}"
        bundle.mkdir()
        for name, content in federation.bundle(SUBMODEL, round_).items():
            (bundle / name).write_bytes(content)
        try:
            updates = [
                _train(bundle, file, scratch / f"update-{round_}-{number}", seed + round_)
                for number, file in enumerate(files)
            ]
        except UpdateError:
            updates = []  # training diverged: the device keeps the model that it has
        if updates:
            federation.fold(updates)
        yield _accuracy(federation, held_out)


def _train(bundle: Path, data: Path, out: Path, seed: int) -> Received:
    train_bundle(bundle, data, out, TrainingOptions(threads=demo_settings.THREADS, seed=seed))
    return read_update(out)


def _accuracy(federation: Federation, held_out: Path) -> float:
    with np.load(held_out) as file:
        accuracy, _ = federation.evaluate(file["x"], file["y"])
    assert accuracy is not None  # digits are classes
    return accuracy


def main(folder: str, rounds: str, seed: str, full_too: str) -> None:
    """Train the baselines on the data in the demo's `folder` and print them as JSON."""
    place = DemoFolder(Path(folder))
    members = demo_settings.members(demo_settings.FLEET)
    data = {member.name: place.data_of(member.name) for member in members}
    found = train_baselines(place.held_out, data, int(rounds), int(seed), full_too == "True")
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main(*sys.argv[1:])
