"""Fine-tuning a release on a device: the training and the choice, against plain PyTorch."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

from bundles import CLASSES, SAMPLE_SHAPE, once, samples, tiny_model
from device_agent.formats.evaluation_counts import EvaluationRequest
from device_agent.inference.fine_tuning import FineTuned, fine_tune, is_better
from device_agent.inference.predictor import Predictor
from device_agent.inference.scores import Scores
from device_agent.training.batching import held_out
from device_agent.training.bundle_training import train_bundle
from device_agent.training.training_options import TrainingOptions
from edgetailor import TrainingConfig, deploy, export, split
from log_messages import logged
from oracles import Device, Plan, assert_trained, state_of, train_full
from refusals import refused
from toolkit.submodels.global_model import from_model
from trainings import training_config

PLAN = Plan(batch_size=4, epochs=1, rate=0.05, momentum=0.9, weight_decay=0.0, steps=12)
SHARE = 0.25
ASKED = EvaluationRequest(share=SHARE)
OPTIONS = TrainingOptions(threads=1, seed=3)


def write_bundles(folder: Path) -> None:
    """A release of a model, and bundles that fine-tune it; one of them is personal."""
    model, source = tiny_model()
    deploy(model, "full", SAMPLE_SHAPE, folder / "release")
    training = training_config(PLAN, steps=PLAN.steps)
    for name, spec in (("training", "full"), ("personal", "cp:2.0")):
        submodel = split(model, spec, SAMPLE_SHAPE, training)
        export(submodel, source, folder / name, verify=False)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "fine-tuning", write_bundles)


def tuned(
    bundles: Path,
    scratch: Path,
    data: tuple[np.ndarray, np.ndarray],
    training: str = "training",
    asked: EvaluationRequest | None = ASKED,
) -> FineTuned:
    return fine_tune(
        train_bundle,
        data,
        OPTIONS,
        bundles / training,
        bundles / "release",
        scratch,
        asked,
        lambda: None,
    )


def right(x: np.ndarray, y: np.ndarray, state: dict[str, torch.Tensor] | None) -> int:
    """How many samples PyTorch's model with these numbers predicts correctly."""
    model, _ = tiny_model()
    model.double().load_state_dict(state or {}, strict=False)
    with torch.no_grad():
        return int((model.eval()(torch.from_numpy(x).double()).argmax(1).numpy() == y).sum())


def test_the_model_and_its_figures_are_those_of_a_plain_loop(bundles: Path, tmp_path: Path) -> None:
    x, y = samples(60, 5)
    apart = held_out(60, SHARE)
    rest = np.setdiff1d(np.arange(60), apart)
    model, _ = tiny_model()
    expected = train_full(model, Device(x[rest], y[rest], OPTIONS.seed), PLAN)
    result = tuned(bundles, tmp_path / "scratch", (x, y))
    assert result.bundle is not None
    assert_trained(load_file(result.bundle / "weights.safetensors"), expected, state_of(model))
    assert result.released is not None
    assert result.tuned is not None
    assert result.released.correct == right(x[apart], y[apart], None)
    assert result.tuned.correct == right(x[apart], y[apart], expected)
    assert result.tuned.correct > result.released.correct
    predicted = Predictor(result.bundle).predict(x[apart]).argmax(1)
    assert (predicted == y[apart]).sum() == result.tuned.correct
    assert result.tuned.samples == len(apart)


def test_a_worse_model_is_not_chosen(bundles: Path, tmp_path: Path) -> None:
    """The labels to train on are wrong, those to compare with are the release's own answers."""
    x, _ = samples(60, 5)
    answers = Predictor(bundles / "release").predict(x).argmax(1).astype(np.int64)
    apart = held_out(60, SHARE)
    y = (answers + 1) % CLASSES
    y[apart] = answers[apart]
    result = tuned(bundles, tmp_path / "scratch", (x, y))
    assert result.bundle is None
    assert result.released is not None
    assert result.released.correct == len(apart)
    assert result.tuned is not None
    assert result.tuned.correct is not None
    assert result.tuned.correct < len(apart)


def test_too_few_samples_are_not_fine_tuned(bundles: Path, tmp_path: Path) -> None:
    assert tuned(bundles, tmp_path / "scratch", samples(16, 5)) == FineTuned()


def test_a_personal_model_is_not_fine_tuned(bundles: Path, tmp_path: Path) -> None:
    with refused("release.personal-model"):
        tuned(bundles, tmp_path / "scratch", samples(60, 5), "personal")


def test_outputs_that_only_the_loss_understands_are_not_compared(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    deploy(model, "full", (4,), tmp_path / "release", training=TrainingConfig(loss="mae"))
    submodel = split(model, "full", (4,), TrainingConfig(loss="mae"))
    export(submodel, from_model(model), tmp_path / "training", verify=False)
    data = np.ones((60, 4), np.float32), np.zeros((60, 2), np.float32)
    with logged() as messages:
        assert tuned(tmp_path, tmp_path / "scratch", data) == FineTuned()
    assert any("only its loss knows what its outputs mean" in said for said in messages)
    assert not (tmp_path / "scratch" / "update").exists()


def scores(correct: list[int] | None, loss: list[float]) -> Scores:
    counted = np.ones(len(loss), np.int64)
    return Scores(counted, None if correct is None else np.array(correct), np.array(loss))


@pytest.mark.parametrize(
    ("after", "better"),
    [
        (scores([1, 1, 0], [9.0, 9.0, 9.0]), True),
        (scores([1, 0, 0], [1.0, 1.0, 0.9]), True),
        (scores([1, 0, 0], [1.0, 1.0, 1.0]), False),
        (scores([0, 0, 0], [0.1, 0.1, 0.1]), False),
        (scores([1, 1, 1], [0.1, 0.1, np.nan]), False),
    ],
)
def test_which_is_better(after: Scores, better: bool) -> None:
    assert is_better(after, scores([1, 0, 0], [1.0, 1.0, 1.0])) is better


def test_a_regression_is_better_with_a_lower_loss() -> None:
    before = scores(None, [1.0, 1.0])
    lower = partial(is_better, before=before)
    assert lower(scores(None, [1.0, 0.9]))
    assert not lower(scores(None, [1.0, 1.1]))
