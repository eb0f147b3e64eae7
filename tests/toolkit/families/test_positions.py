"""Models with a label for each position, from the data to the global model, against PyTorch.

A label of -100 is no label: PyTorch's cross-entropy ignores it.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import eager
import oracles
from device_agent.data.local_data import load_data
from device_agent.formats.bundle import open_bundle
from device_agent.formats.evaluation_counts import Evaluation
from device_agent.formats.label_rule import LabelRule
from device_agent.formats.update import read_update
from device_agent.training.batching import held_out
from device_agent.training.random_run import synthetic
from edgetailor import Federation, TrainingConfig, split
from exporters.export import Format, export
from oracles import Device, Plan
from parameters import quarter_quick, some_long
from refusals import refused
from toolkit import model_evaluation
from toolkit.model_evaluation import evaluate
from toolkit.submodels.global_model import from_model
from toolkit.submodels.hyperparameters import Loss
from trainings import evaluate_bundle, train_bundle

SAMPLES = 13
CLASSES = 4
WORDS = 11
PLAN = Plan(batch_size=5, epochs=2, rate=0.5, momentum=0.9, weight_decay=0.0)
TRAINING = TrainingConfig(PLAN.batch_size, PLAN.epochs, PLAN.rate, PLAN.momentum)
TRUTH = Callable[[Tensor, Tensor], Tensor]


def tagger() -> nn.Sequential:
    """Words (n, 6) to logits (n, 6, 4)."""
    return nn.Sequential(
        nn.Embedding(WORDS, 5), nn.LayerNorm(5), nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, CLASSES)
    )


def segmentation(outputs: int = CLASSES) -> nn.Sequential:
    """Images (n, 2, 6, 4) to logits (n, 4, 6, 4)."""
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(2, 6, 3, 2, 1, bias=False),
            bn=nn.BatchNorm2d(6),
            act=nn.Tanh(),
            body=nn.Conv2d(6, 8, 3, padding=1),
            bend=nn.Sigmoid(),
            up=nn.Upsample(scale_factor=2),
            middle=nn.Conv2d(8, 8, 3, padding=1),
            squash=nn.Tanh(),
            head=nn.Conv2d(8, outputs, 1),
        )
    )


def series(width: int = 8) -> nn.Sequential:
    """Series (n, 6, 3) to logits (n, 6, 4)."""
    return nn.Sequential(
        OrderedDict(
            first=nn.Linear(3, width),
            act=nn.Tanh(),
            middle=nn.Linear(width, width),
            bend=nn.Tanh(),
            head=nn.Linear(width, CLASSES),
        )
    )


@dataclass(frozen=True)
class Kind:
    """A model, its loss in PyTorch, and the shapes of a sample and of its labels."""

    build: Callable[[], nn.Sequential]
    shape: tuple[int, ...]
    labels: tuple[int, ...]
    truth: TRUTH = oracles.cross_entropy
    loss: Loss = "cross-entropy"


def binary_truth(output: Tensor, y: Tensor) -> Tensor:
    counted = y != -100
    return functional.binary_cross_entropy_with_logits(output[:, 0][counted], y[counted].to(output))


def ctc_truth(output: Tensor, y: Tensor) -> Tensor:
    lengths = (y != -100).sum(1)
    losses = functional.ctc_loss(
        output.log_softmax(2).transpose(0, 1),
        y.clamp(min=0),
        torch.full_like(lengths, y.shape[1]),
        lengths,
        reduction="none",
        zero_infinity=True,
    )
    return losses[lengths > 0].sum() / lengths.sum().clamp(min=1)


def squared_truth(output: Tensor, y: Tensor) -> Tensor:
    return functional.mse_loss(output, y.to(output))


KINDS = {
    "tagger": Kind(tagger, (6,), (6,)),
    "segmentation": Kind(segmentation, (2, 6, 4), (6, 4)),
    "one class": Kind(lambda: segmentation(1), (2, 6, 4), (6, 4), binary_truth),
    "numbers": Kind(lambda: segmentation(3), (2, 6, 4), (3, 6, 4), squared_truth, "mse"),
    "series": Kind(series, (6, 3), (6,)),
    "sounds": Kind(series, (6, 3), (6,), ctc_truth, "ctc"),
}


def device(kind: Kind, seed: int, samples: int = SAMPLES) -> Device:
    """Local data. Some labels are ignored, among them all of the first sample."""
    draw = np.random.default_rng(seed)
    x: np.ndarray = draw.standard_normal((samples, *kind.shape), dtype=np.float32)
    if kind.build is tagger:
        x = draw.integers(WORDS, size=x.shape)
    if kind.loss == "mse":
        y: np.ndarray = draw.standard_normal((samples, *kind.labels), dtype=np.float32)
        return Device(x, y, seed % 1000)
    y = draw.integers(2 if kind.truth is binary_truth else CLASSES, size=(samples, *kind.labels))
    if kind.loss == "ctc":  # sequences of classes that are no blank
        y = y.clip(min=1)
        y[np.arange(y.shape[1]) >= draw.integers(5, size=(samples, 1))] = -100
    else:
        y[draw.random(y.shape) < 0.3] = -100
    y[0] = -100
    return Device(x, y, seed % 1000)


def output_of(model: nn.Module, x: np.ndarray) -> Tensor:
    model = copy.deepcopy(model).double().eval()
    with torch.no_grad():
        given = torch.from_numpy(x)
        output: Tensor = model(given.double() if given.is_floating_point() else given)
    return output


def chosen(output: Tensor) -> np.ndarray:
    """The predicted class of each position."""
    axis = 2 if output.dim() == 3 else 1
    return (output[:, 0] > 0 if output.shape[axis] == 1 else output.argmax(axis)).numpy()


def train(model: nn.Module, local: Device, truth: TRUTH) -> oracles.State:
    model = copy.deepcopy(model).double().train()
    optimizer = torch.optim.SGD(model.parameters(), PLAN.rate, PLAN.momentum)
    x = torch.from_numpy(local.x)
    x = x.double() if x.is_floating_point() else x
    for y, indices in local.visits(PLAN):
        oracles.descend(optimizer, truth(model(x[indices]), y))
    return oracles.state_of(model)


@pytest.mark.parametrize(
    ("name", "format"),
    quarter_quick(
        some_long(
            [
                *(("tagger", "onnx"), ("tagger", "tflite")),
                *(("segmentation", "onnx"), ("segmentation", "tflite")),
                *(("one class", "tflite"), ("numbers", "onnx")),
                *(("sounds", "onnx"), ("sounds", "tflite")),
            ],
            *(("tagger", "onnx"), ("segmentation", "tflite"), ("sounds", "tflite")),
            ("numbers", "onnx"),
        )
    ),
)
def test_a_device_trains_and_judges_as_pytorch(
    name: str, format: Format, seed: int, tmp_path: Path
) -> None:
    kind = KINDS[name]
    torch.manual_seed(seed)
    model, local = kind.build(), device(kind, seed)
    config = TrainingConfig(PLAN.batch_size, PLAN.epochs, PLAN.rate, PLAN.momentum, loss=kind.loss)
    submodel = split(model, "full", kind.shape, config)
    base = from_model(model)
    export(
        *(submodel.program, submodel.cut(base), tmp_path / "bundle"),
        base=base.fingerprint(),
        format=format,
    )
    evaluation = evaluate_bundle(tmp_path / "bundle", (local.x, local.y), threads=1)
    output, y = output_of(model, local.x), torch.from_numpy(local.y)
    assert evaluation.loss == pytest.approx(float(kind.truth(output, y)), rel=1e-5)
    if kind.loss in ("mse", "ctc"):
        assert (evaluation.correct, evaluation.accuracy) == (None, None)
    else:
        assert evaluation.counted == np.count_nonzero(local.y != -100) < local.y.size
        assert evaluation.correct == np.count_nonzero(chosen(output) == local.y)
        assert evaluation.accuracy == evaluation.correct / evaluation.counted
    judged = evaluate(copy.deepcopy(model), local.x, local.y, loss=kind.loss)
    assert (judged.samples, judged.counted) == (evaluation.samples, evaluation.counted)
    assert judged.accuracy == evaluation.accuracy
    assert judged.loss == pytest.approx(evaluation.loss, rel=1e-5)

    data = (local.x, local.y)
    train_bundle(tmp_path / "bundle", data, tmp_path / "update", threads=1, seed=local.seed)
    _, came = read_update(tmp_path / "update")
    for tensor, value in train(model, local, kind.truth).items():
        error = float((torch.from_numpy(came[tensor]) - value).norm() / value.norm())
        assert error < 1e-4, f"{tensor}: {error:.1e}"
    generated = synthetic(open_bundle(tmp_path / "bundle"), 3)
    assert (generated.y.shape, generated.y.dtype) == ((3, *kind.labels), local.y.dtype)


@pytest.mark.long
def test_a_mixed_fleet(seed: int, tmp_path: Path) -> None:
    kind, cut, ranks = KINDS["segmentation"], "body", {"body": 4, "middle": 4}
    federation = Federation(f"{__name__}:segmentation", kind.shape, TRAINING, seed=seed % 1000)
    federation.model.load_into(federation.module)
    model, old = federation.module, oracles.state_of(federation.module)
    assert isinstance(model, nn.Sequential)
    specs = ("full", "low-rank:0.5,keep=1", f"slice:{cut}")
    fleet = [device(kind, seed + number, size) for number, size in enumerate((13, 6, 9))]
    expected = [
        oracles.train_full(model, fleet[0], PLAN),
        oracles.train_low_rank(model, ranks, 0.0, fleet[1], PLAN),
        oracles.train_slice(model, cut, fleet[2], PLAN),
    ]
    mean = oracles.mean([(u, len(d.y)) for u, d in zip(expected, fleet, strict=True)], old)
    for spec, local in zip(specs, fleet, strict=True):
        bundle, out = tmp_path / spec / "bundle", tmp_path / spec / "update"
        bundle.mkdir(parents=True)
        for file, data in federation.bundle(spec).items():
            (bundle / file).write_bytes(data)
        train_bundle(bundle, (local.x, local.y), out, threads=1, seed=local.seed)
    federation.fold([read_update(tmp_path / spec / "update") for spec in specs])
    accuracy, loss = federation.evaluate(fleet[0].x, fleet[0].y)
    came = oracles.state_of(federation.module)
    for tensor, value in mean.items():
        error = float((came[tensor] - value).norm() / value.norm())
        assert error < 1e-4, f"{tensor}: {error:.1e}"
    output = output_of(federation.module, fleet[0].x)
    y = fleet[0].y
    assert accuracy == np.count_nonzero(chosen(output) == y) / np.count_nonzero(y != -100)
    assert loss == pytest.approx(float(oracles.cross_entropy(output, torch.from_numpy(y))))


def test_width_is_the_leading_channels(seed: int) -> None:
    kind = KINDS["series"]
    torch.manual_seed(seed)
    model, local = kind.build(), device(kind, seed)
    submodel = split(model, "width:0.5", kind.shape, TrainingConfig(momentum=0.0))
    state = eager.first_state(submodel, submodel.cut(from_model(model)))
    x, y = torch.from_numpy(local.x).double(), torch.from_numpy(local.y)
    new = eager.call(submodel, "train", state, x=x, y=y, rate=1.0)
    small = series(4).double()
    large = model.state_dict()
    small.load_state_dict({n: large[n][oracles.leading(v)] for n, v in small.state_dict().items()})
    loss = oracles.cross_entropy(small(x), y)
    loss.backward()
    torch.testing.assert_close(new["loss"], loss.detach())
    for name, value in small.named_parameters():
        torch.testing.assert_close(state[name] - new[name], value.grad)


def test_batches_without_labels_change_nothing(seed: int, tmp_path: Path) -> None:
    """Two of three batches have no label that counts."""
    kind = KINDS["series"]
    torch.manual_seed(seed)
    model, local = kind.build(), device(kind, seed, 15)
    plain = TrainingConfig(PLAN.batch_size, 1, PLAN.rate, 0.0)
    submodel, base = split(model, "full", kind.shape, plain), from_model(model)
    values = submodel.cut(base)
    export(submodel.program, values, tmp_path / "bundle", base=base.fingerprint())
    order = [i for _, i in local.visits(Plan(PLAN.batch_size, 1, PLAN.rate, 0.0, 0.0))]
    local.y[np.concatenate(order[1:])] = -100
    data = (local.x, local.y)
    train_bundle(tmp_path / "bundle", data, tmp_path / "update", threads=1, seed=local.seed)
    record, came = read_update(tmp_path / "update")
    first = torch.from_numpy(local.x[order[0]]), torch.from_numpy(local.y[order[0]])
    model = model.double()
    loss = oracles.cross_entropy(model(first[0].double()), first[1])
    loss.backward()
    assert record.loss_last == pytest.approx(loss.item() / 3, rel=1e-5)
    for name, value in model.named_parameters():
        assert value.grad is not None
        expected = (value - PLAN.rate * value.grad).detach().numpy()
        np.testing.assert_allclose(came[name], expected, rtol=1e-5, atol=1e-6)


def test_validation_counts_labels(seed: int, tmp_path: Path) -> None:
    kind = KINDS["series"]
    federation = Federation(f"{__name__}:series", kind.shape, TRAINING, seed=seed % 1000)
    local = device(kind, seed)
    (tmp_path / "bundle").mkdir()
    for file, data in federation.bundle("full").items():
        (tmp_path / "bundle" / file).write_bytes(data)
    data = (local.x, local.y)
    out = tmp_path / "update"
    train_bundle(tmp_path / "bundle", data, out, threads=1, seed=local.seed, validation=0.4)
    record, came = read_update(out)
    evaluation = record.validation[-1]
    model = kind.build()
    model.load_state_dict({n: torch.from_numpy(v) for n, v in came.items()})
    own = held_out(SAMPLES, 0.4)
    right = np.count_nonzero(chosen(output_of(model, local.x[own])) == local.y[own])
    counted = np.count_nonzero(local.y[own] != -100)
    assert (evaluation.samples, evaluation.counted, evaluation.correct) == (
        len(own),
        counted,
        right,
    )
    assert str(evaluation) == f"loss {evaluation.loss:.4f}, accuracy {right / counted:.1%}"


@pytest.mark.parametrize(
    ("correct", "counted", "accuracy", "text"),
    [
        (3, 6, 0.5, "loss 1.0000, accuracy 50.0%"),
        (3, None, 0.75, "loss 1.0000, accuracy 75.0%"),  # a record of an older agent
        (0, 0, None, "loss 1.0000"),
        (None, 4, None, "loss 1.0000"),
    ],
)
def test_accuracy_is_a_share_of_the_labels_that_count(
    correct: int | None, counted: int | None, accuracy: float | None, text: str
) -> None:
    evaluation = Evaluation(samples=4, loss=1.0, correct=correct, counted=counted)
    assert (evaluation.accuracy, str(evaluation)) == (accuracy, text)


def test_large_outputs_are_judged_in_small_pieces(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = KINDS["segmentation"]
    model, local = kind.build(), device(kind, seed)
    whole = evaluate(model, local.x, local.y)
    sizes = []
    model.register_forward_hook(lambda _, given, __: sizes.append(len(given[0])))
    monkeypatch.setattr(model_evaluation, "NUMBERS", 3 * CLASSES * 6 * 4)
    pieces = evaluate(model, local.x, local.y)
    assert max(sizes) == 3
    assert (pieces.counted, pieces.accuracy) == (whole.counted, whole.accuracy)
    assert pieces.loss == pytest.approx(whole.loss, rel=1e-6)


Y = np.zeros((4, 6), np.int64)
X = np.zeros((4, 6, 3), np.float32)
RULE = LabelRule(CLASSES, (6,))


@pytest.mark.parametrize(
    ("y", "code", "values"),
    [
        (Y[:, :5], "data.wrong-shape", {"y_shape": [4, 5]}),
        (Y[:, 0], "data.wrong-shape", {"y_shape": [4]}),
        (Y - 1, "data.label-out-of-range", {"label": -1, "highest": 3}),
        (Y + CLASSES, "data.label-out-of-range", {"label": 4, "highest": 3}),
        (Y - 100, "data.no-labels", {}),
        (Y.astype(np.float32), "data.wrong-type", {"y_type": "float32"}),
    ],
)
def test_labels_that_do_not_fit(y: np.ndarray, code: str, values: dict[str, object]) -> None:
    with refused(code, **values):
        load_data((X, y), (6, 3), RULE)
    if code != "data.wrong-type":
        with refused(code):
            evaluate(series(), X, y)


def test_a_sample_with_one_label_cannot_be_ignored() -> None:
    with refused("data.label-out-of-range", label=-100, highest=3):
        load_data((X, np.array([0, 1, 2, -100])), (6, 3), LabelRule(CLASSES))


def test_labels_of_one_class_are_remarked() -> None:
    y = np.full((4, 6), -100)
    y[2, 3] = 1
    (remark,) = load_data((X, y), (6, 3), RULE).remarks
    assert "every label that is not ignored is the class 1" in remark


@pytest.mark.parametrize("name", ["tagger", "segmentation"])
def test_a_masked_loss_needs_one_class_a_sample(name: str) -> None:
    kind = KINDS[name]
    with refused("model.masked-output"):
        split(kind.build(), "full", kind.shape, TrainingConfig(masked=True))


def test_outputs_that_no_loss_takes() -> None:
    class Without(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).squeeze(1)

    with refused("model.loss-mismatch", loss="cross-entropy", shape=[]):
        split(Without(), "full", (3,))
    split(Without(), "full", (3,), TrainingConfig(loss="mse"))

    class Scalar(Without):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).mean()

    with refused("model.wrong-output"):
        split(Scalar(), "full", (3,))
