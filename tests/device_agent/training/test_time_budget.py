"""A training with a time budget: it ends early, and its update says on how many samples."""

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bundles import BATCH, EPOCHS, BundleOf, rewrite, write_data
from device_agent.training import bundle_training, schedule_interpreter
from device_agent.training.bundle_training import Trained
from device_agent.training.training_options import TrainingOptions

SAMPLES = 10  # batches of 4, 4 and 2
EACH = 3


@pytest.fixture
def train(
    bundle_of: BundleOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Trained]:
    """Train on a machine on which every batch takes a second."""
    clock = itertools.count()
    monkeypatch.setattr(
        schedule_interpreter, "time", SimpleNamespace(perf_counter=lambda: float(next(clock)))
    )
    data = str(write_data(tmp_path / "local.npz", count=SAMPLES))

    def run(out: str, budget_s: float | None, family: str = "full", **more: Any) -> Trained:
        options = TrainingOptions(threads=1, seed=3, budget_s=budget_s)
        bundle = more.pop("bundle", bundle_of(family))
        return bundle_training.train_bundle(bundle, data, tmp_path / out, options, **more)

    return run


@pytest.mark.parametrize(
    ("budget_s", "batches", "samples"),
    [
        (0.001, 1, BATCH),
        (2.0, 2, 2 * BATCH),
        (2.5, 3, SAMPLES),
        (4.0, 4, SAMPLES),
        (1e9, EPOCHS * EACH, SAMPLES),
    ],
)
def test_a_training_ends_after_the_batch_in_which_its_time_is_used_up(
    train: Callable[..., Trained],
    bundle_of: BundleOf,
    tmp_path: Path,
    budget_s: float,
    batches: int,
    samples: int,
) -> None:
    """Its tensors are those of a training whose schedule has only these batches."""
    record = train("early", budget_s).record
    assert (record.steps, record.samples) == (batches, samples)
    shorter = shutil.copytree(bundle_of("full"), tmp_path / "shorter")
    rewrite(shorter, lambda manifest: manifest["schedule"][-1].update(batches=batches))
    whole = train("whole", None, bundle=shorter).record
    assert (whole.steps, whole.samples) == (batches, SAMPLES)  # a schedule changes no weight
    assert record.loss_last == whole.loss_last
    assert tensors(tmp_path / "early") == tensors(tmp_path / "whole")


def tensors(update: Path) -> bytes:
    return (update / "update.safetensors").read_bytes()


def test_recordings_count_and_one_batch_is_always_trained(train: Callable[..., Trained]) -> None:
    recorded = train("recorded", 1e9, "slice").record
    assert recorded.steps == EPOCHS * EACH
    assert train("short", 1.0, "slice").record.steps == 1


def test_a_resumed_training_has_only_the_rest_of_its_time(
    train: Callable[..., Trained], tmp_path: Path
) -> None:
    calls = itertools.count(1)

    def interrupted() -> None:
        if next(calls) == EACH + 2:  # in the second epoch; the first has a checkpoint
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train("resumed", 5.0, on_batch=interrupted)
    assert train("resumed", 5.0).record.steps == 5
    train("whole", 5.0)
    assert tensors(tmp_path / "resumed") == tensors(tmp_path / "whole")
