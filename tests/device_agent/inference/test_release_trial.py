"""The trial of a release: its scores against PyTorch, its rule, and real bundles."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from device_agent.data.data_source import Data
from device_agent.formats.evaluation_counts import EvaluationRequest
from device_agent.inference.predictor import Predictor
from device_agent.inference.probabilities import probabilities
from device_agent.inference.release_trial import try_release, worse
from device_agent.inference.scores import Scores, scores_of
from device_agent.training.training_options import TrainingOptions
from edgetailor import deploy, export, load_model, pack_inputs, split
from refusals import refused
from toolkit.submodels.global_model import from_model

IGNORED = -100
DRAW = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=DRAW)


def labels(classes: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, classes, shape, generator=DRAW)


@pytest.mark.parametrize(
    ("logits", "y"),
    [(normal(6, 5), labels(5, 6)), (normal(6, 5, 3, 4), labels(5, 6, 3, 4))],
)
def test_scores_of_classes_are_those_of_pytorch(logits: torch.Tensor, y: torch.Tensor) -> None:
    if y.dim() > 1:
        y[:, 0, :2] = IGNORED
    scores = scores_of("softmax", probabilities(logits.numpy(), "softmax"), y.numpy())
    loss = functional.cross_entropy(logits, y, reduction="none").reshape(6, -1)
    assert scores.correct is not None
    np.testing.assert_allclose(scores.loss, loss.sum(1), rtol=1e-5)
    assert scores.counted.tolist() == (y != IGNORED).reshape(6, -1).sum(1).tolist()
    assert scores.correct.tolist() == (logits.argmax(1) == y).reshape(6, -1).sum(1).tolist()
    counts = scores.counts()
    assert (counts.samples, counts.counted) == (6, int((y != IGNORED).sum()))


def test_scores_of_steps_have_the_class_axis_last() -> None:
    logits, y = normal(6, 7, 5), labels(5, 6, 7)
    scores = scores_of("softmax", probabilities(logits.numpy(), "softmax"), y.numpy())
    loss = functional.cross_entropy(logits.transpose(1, 2), y, reduction="none")
    np.testing.assert_allclose(scores.loss, loss.sum(1), rtol=1e-5)


def test_scores_of_two_classes_with_one_logit() -> None:
    logits, y = normal(6, 1), labels(2, 6)
    scores = scores_of("sigmoid", probabilities(logits.numpy(), "sigmoid"), y.numpy())
    loss = functional.binary_cross_entropy_with_logits(logits[:, 0], y.float(), reduction="none")
    np.testing.assert_allclose(scores.loss, loss, rtol=1e-5)
    assert scores.correct is not None
    assert scores.correct.tolist() == ((logits[:, 0] > 0) == y.bool()).int().tolist()


def test_scores_of_numbers() -> None:
    output, y = normal(6, 3), normal(6, 3)
    scores = scores_of("numbers", output.numpy(), y.numpy())
    expected = functional.mse_loss(output, y, reduction="none").mean(1)
    np.testing.assert_allclose(scores.loss, expected, rtol=1e-5)
    assert scores.counts().correct is None


def test_scores_of_sequences_are_the_ctc_loss() -> None:
    logits = normal(4, 12, 5)
    y = torch.tensor([[1, 2, 2, -100], [3, -100, -100, -100], [1, 1, 1, 1], [4, 3, 2, 1]])
    expected = functional.ctc_loss(
        logits.log_softmax(2).transpose(0, 1),
        y.clamp(0),
        torch.full((4,), 12),
        (y != IGNORED).sum(1),
        reduction="none",
    )
    scores = scores_of("ctc", probabilities(logits.numpy(), "ctc"), y.numpy())
    np.testing.assert_allclose(scores.loss, expected, rtol=1e-5)


def right(*correct: int) -> Scores:
    ones = np.ones(len(correct), np.int64)
    return Scores(ones, np.array(correct), ones.astype(float))


def losses(values: np.ndarray) -> Scores:
    return Scores(np.ones(len(values), np.int64), None, values)


@pytest.mark.parametrize(
    ("lost", "won", "same", "is_worse"),
    [
        (2, 0, 0, False),  # two samples say nothing
        (4, 0, 0, False),  # 1/16
        (5, 0, 0, True),  # 1/32
        (5, 0, 400, False),  # less than two points
        (10, 0, 90, True),
        (12, 5, 83, False),  # 7 points, but by chance in 7%
        (17, 3, 80, True),
        (0, 30, 10, False),
    ],
)
def test_worse_is_more_than_the_margin_and_more_than_chance(
    lost: int, won: int, same: int, is_worse: bool
) -> None:
    before = right(*[1] * lost, *[0] * won, *[1] * same)
    after = right(*[0] * lost, *[1] * won, *[1] * same)
    reason = worse(before, after)
    assert (reason is not None) is is_worse


def test_a_regression_is_judged_by_its_loss() -> None:
    draw = np.random.default_rng(0)
    before = draw.uniform(0.5, 1, 100)
    assert worse(losses(before), losses(before * 1.01)) is None
    assert worse(losses(before), losses(before * 1.05)) is not None
    assert worse(losses(before), losses(draw.permutation(before))) is None
    assert worse(losses(before[:4]), losses(before[:4] * 9)) is None
    assert worse(losses(before), losses(np.full(100, np.nan))) is not None
    assert worse(losses(np.full(100, np.nan)), losses(before)) is None


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model as `training` and `release`, and with one bad class as `bad`."""
    folder = tmp_path_factory.mktemp("bundles")
    model = load_model("toolkit.models:digits_cnn", seed=3)
    submodel = split(model, "full", sample_shape=(1, 8, 8))
    export(submodel, from_model(model), folder / "training", verify=False)
    deploy(model, "full", (1, 8, 8), folder / "release")
    with torch.no_grad():
        list(model.parameters())[-1].add_(torch.eye(10)[0] * 1e4)  # it always says 0
    deploy(model, "full", (1, 8, 8), folder / "bad")
    return folder


def own_samples(bundles: Path, number: int) -> Data:
    """Samples with the labels that the model predicts."""
    x = np.random.default_rng(1).normal(size=(number, 1, 8, 8)).astype(np.float32)
    return x, Predictor(bundles / "release").predict(x).argmax(1).astype(np.int64)


def test_the_first_release_is_compared_with_the_training_bundle(bundles: Path) -> None:
    data, options = own_samples(bundles, 400), TrainingOptions(threads=1)
    good = try_release(data, options, bundles / "release", bundles / "training", None)
    assert good.reason is None
    assert good.before is not None
    assert good.after is not None
    assert (good.before.samples, good.before.correct, good.after.correct) == (40, 40, 40)
    assert good.before.loss_sum == pytest.approx(good.after.loss_sum, rel=1e-4)
    asked = EvaluationRequest(share=0.3)
    bad = try_release(data, options, bundles / "bad", bundles / "training", asked)
    assert bad.reason is not None
    assert "on 120 own samples; present model: 100.0%" in bad.reason
    assert try_release(data, options, bundles / "bad", None, asked).reason is None
    assert not list(bundles.glob(".trial.*"))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(5, 3)

    def forward(self, near: torch.Tensor, far: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.cat([near, far], 1))
        return out


def test_a_release_of_several_inputs_is_compared(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = TwoInputs()
    x = {"near": normal(60, 2).numpy(), "far": normal(60, 3).numpy()}
    with torch.no_grad():
        y = model(*map(torch.from_numpy, x.values())).argmax(1).numpy()
    pack_inputs(model, near=(2,), far=(3,))
    export(split(model, "full", (5,)), from_model(model), tmp_path / "training", verify=False)
    deploy(model, "full", (5,), tmp_path / "release")
    before, offered = tmp_path / "training", tmp_path / "release"
    result = try_release((x, y), TrainingOptions(), offered, before, None)
    assert result.before is not None
    assert result.after is not None
    assert (result.reason, result.before.correct, result.after.correct) == (None, 6, 6)


def test_few_samples_refuse_nothing(bundles: Path) -> None:
    data = own_samples(bundles, 20)
    result = try_release(data, TrainingOptions(), bundles / "bad", bundles / "release", None)
    assert result.reason is None
    assert result.after is not None
    assert result.after.samples == 2


@pytest.mark.parametrize("number", [20, 400])
def test_predictions_that_are_not_finite_are_never_taken(
    bundles: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    data, options = own_samples(bundles, number), TrainingOptions(threads=1)
    predict = Predictor.predict_packed

    def overflows(self: Predictor, x: np.ndarray) -> np.ndarray:
        return predict(self, x) * (np.nan if self.bundle.folder.name == "bad" else 1)

    monkeypatch.setattr(Predictor, "predict_packed", overflows)
    for present in (None, bundles / "release"):
        result = try_release(data, options, bundles / "bad", present, None)
        assert result.reason == "its predictions are not finite numbers"
        assert result.after is None  # a coordinator refuses a report with a loss that is not finite
    back = try_release(data, options, bundles / "release", bundles / "bad", None)
    assert (back.reason, back.before) == (None, None)


def test_what_cannot_be_released(bundles: Path) -> None:
    data = own_samples(bundles, 20)
    with refused("release.no-inference-bundle"):
        try_release(data, TrainingOptions(), bundles / "training", None, None)
    with refused("memory.does-not-fit"):
        try_release(data, TrainingOptions(max_memory=10**6), bundles / "release", None, None)
    (bundles / "release" / "predict.onnx").rename(bundles / "gone.onnx")
    with refused("bundle.missing-file"):
        try_release(data, TrainingOptions(), bundles / "release", None, None)
    (bundles / "gone.onnx").rename(bundles / "release" / "predict.onnx")
