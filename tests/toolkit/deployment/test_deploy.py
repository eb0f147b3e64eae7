"""Deployed bundles predict what PyTorch predicts, and their cards say how well."""

import base64
import copy
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from msgspec.structs import replace
from torch import nn

import deployed_digits
import edgetailor as et
from device_agent.formats.atomic_files import fingerprint_file
from device_agent.formats.bundle import open_bundle
from device_agent.formats.manifest import Record, TensorEntry
from device_agent.formats.manifest_validation import check_consistent
from device_agent.formats.preprocessing import Series
from device_agent.formats.protocol.fleet import RoundResult
from exporters.quantization.precision import converted
from exporters.runtime_graph import Graph
from refusals import refused
from toolkit.coordinator.database.key_log import KEY
from toolkit.coordinator.federation_file.load_config import load_config
from toolkit.coordinator.storage.coordinator_store import Store
from toolkit.coordinator.storage.saved_rounds import best_round
from toolkit.deployment.card_fields import Speed
from toolkit.deployment.deploy import Deployed
from toolkit.deployment.deploy_targets import deploy_targets, exit_code
from toolkit.deployment.make_card import speed_notes
from toolkit.deployment.predicting_submodel import predicting_submodel
from toolkit.deployment.targets import Target, kind_targets
from toolkit.deployment.trained_model import from_federation

SHAPE = (1, 8, 8)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deployed_digits.federation(tmp_path_factory)


@pytest.fixture(scope="module")
def deployed(federation: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Deployed]:
    """The bundles of all kinds, for the best round."""
    config = load_config(federation / deployed_digits.FILE)
    out = tmp_path_factory.mktemp("deployed") / "out"
    outcomes = deploy_targets(from_federation(config, 1), kind_targets(config, [], out))
    return {o.target.name: o.deployed for o in outcomes if o.deployed is not None}


@pytest.fixture(scope="module")
def trained(federation: Path) -> nn.Module:
    """The model of the best round."""
    weights = federation / deployed_digits.WEIGHTS
    return et.load_model(deployed_digits.MODEL, weights).eval()


def held_out() -> tuple[np.ndarray, np.ndarray]:
    return deployed_digits.split_digits()[1]


def by_card(folder: Path, x: np.ndarray) -> np.ndarray:
    """The outputs of stock ONNX Runtime or LiteRT, run with what the card says."""
    card = json.loads((folder / "card.json").read_bytes())
    for graph in card["graphs"]:
        file, source, output = folder / graph["file"], graph["input"], graph["output"]
        if card["format"] == "tflite":
            from ai_edge_litert.interpreter import Interpreter

            runner = Interpreter(str(file)).get_signature_runner(graph["signature"])
            x = np.asarray(runner(**{source: x})[output])
        else:
            (x,) = onnxruntime.InferenceSession(file).run([output], {source: x})
    return x


def in_torch(module: nn.Module, x: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return module.eval()(torch.from_numpy(x)).numpy()  # type: ignore[no-any-return]


def composed(module: nn.Module, ratio: float) -> nn.Module:
    """The model with the truncated SVD of each 3 x 3 kernel but the first (FedHM, eq. 1)."""
    module = copy.deepcopy(module)
    units = module.units
    for unit in list(units)[1:]:
        weight = unit.conv.weight.detach()
        n, m, kh, kw = weight.shape
        # Rows are (input channel, height), columns (width, output channel), as in the paper.
        matrix = weight.permute(1, 2, 3, 0).reshape(m * kh, kw * n)
        u, s, v = torch.linalg.svd(matrix, full_matrices=False)
        rank = max(1, round(ratio * n))
        small = (u[:, :rank] * s[:rank]) @ v[:rank]
        unit.conv.weight.data = small.reshape(m, kh, kw, n).permute(3, 0, 1, 2)
    return module


def test_predictions_are_those_of_pytorch(
    deployed: dict[str, Deployed], trained: nn.Module
) -> None:
    """One session of stock ONNX Runtime with one input predicts what the model predicts."""
    x, _ = held_out()
    right = in_torch(trained, x)
    for kind in ("desktop", "sensor", "phone", "planned"):
        np.testing.assert_allclose(by_card(deployed[kind].out, x), right, rtol=1e-5, atol=1e-5)
    right = in_torch(composed(trained, 0.5), x)
    np.testing.assert_allclose(by_card(deployed["board"].out, x), right, rtol=1e-4, atol=1e-4)


def test_the_card_has_the_figures_of_this_file(
    deployed: dict[str, Deployed], trained: nn.Module
) -> None:
    x, y = held_out()
    log_p = nn.functional.log_softmax(torch.from_numpy(in_torch(trained, x)), 1)
    whole = float((log_p.argmax(1).numpy() == y).mean())
    assert whole > 0.9
    for kind, bundle in deployed.items():
        card = json.loads((bundle.out / "card.json").read_bytes())
        logits = by_card(bundle.out, x).astype(np.float64)
        p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        assert card["quality"]["accuracy"] == pytest.approx((p.argmax(1) == y).mean())
        assert card["quality"]["loss"] == pytest.approx(-np.log(p[np.arange(len(y)), y]).mean())
        assert card["quality"]["samples"] == card["quality"]["labels"] == len(y)
        assert card["global_quality"]["accuracy"] == pytest.approx(whole)
        assert card["global_quality"]["loss"] == pytest.approx(
            float(nn.functional.nll_loss(log_p, torch.from_numpy(y))), abs=1e-6
        )
        assert (card["kind"], card["round"]) == (kind, 1)
        own = {"devices": 4, "samples": 30, "accuracy": 0.8, "loss": 0.5}
        assert card["device_quality"] == {
            "devices": 12, "samples": 96, "accuracy": 0.9375, "loss": 0.2, "worst_accuracy": 0.75,
            "kind": own if kind == "board" else None,
        }  # fmt: skip
        assert card["input"]["shape"] == [None, *SHAPE]
        assert card["output"] == {
            "shape": [None, 10], "probabilities": "softmax", "class_axis": 1
        }  # fmt: skip
        assert card["bundle_sha256"] == fingerprint_file(bundle.out / "manifest.json").sha256
        assert card["graph_bytes"] == (bundle.out / "predict.onnx").stat().st_size
        text = (bundle.out / "CARD.md").read_text()
        assert f"accuracy {card['quality']['accuracy']:.2%}" in text
        assert card["bundle_sha256"] in text
        assert "93.75%, loss 0.2000 on 96 samples of 12 devices; accuracy 75.00% on the" in text
        of_kind = "of kind `board` | accuracy 80.00%, loss 0.5000 on 30 samples of 4 devices |"
        assert (of_kind in text) == (kind == "board")


def test_a_federation_without_central_data(federation: Path, tmp_path: Path) -> None:
    """Only its devices know how good the model is. int8 needs samples from the operator."""
    text = (federation / deployed_digits.FILE).read_text()
    text = text.replace('held_out = "held_out.npz"\n', f'state = "{federation}/state"\n')
    (tmp_path / "federation.toml").write_text(f"{text}\n[evaluation]\nshare = 0.2\n")
    config = load_config(tmp_path / "federation.toml")
    targets = kind_targets(config, ["board"], tmp_path / "out")
    (outcome,) = deploy_targets(from_federation(config, 1), targets)
    assert outcome.deployed is not None
    card = outcome.deployed.card
    assert (card.quality, card.global_quality) == (None, None)
    assert card.device_quality is not None
    assert card.device_quality.accuracy == 0.9375
    (target,) = targets
    int8 = dataclasses.replace(target, out=tmp_path / "int8", precision="int8")
    (outcome,) = deploy_targets(from_federation(config, 1), [int8])
    assert outcome.error is not None
    assert outcome.error.code == "deploy.no-calibration"
    assert exit_code([outcome]) == 2
    assert not (tmp_path / "int8").exists()


def test_no_round_is_judged(tmp_path: Path) -> None:
    store = Store(tmp_path / "state", 1)
    store.add_result(RoundResult(round=0, accuracy=None, loss=None, updates=0), b"model")
    store.close()
    with refused("round.none-judged"):
        best_round(tmp_path / "state")


def test_the_bundle_predicts_only(deployed: dict[str, Deployed]) -> None:
    for bundle in deployed.values():
        opened = open_bundle(bundle.out)
        manifest = opened.manifest
        assert (list(manifest.signatures), manifest.schedule, manifest.tensors) == (
            ["predict"], (), ()
        )  # fmt: skip
        assert manifest.output == "softmax"
        assert {path.name for path in bundle.out.iterdir()} == {
            "manifest.json", "predict.onnx", "card.json", "CARD.md", "card.sig"
        }  # fmt: skip
        assert bundle.verdict is not None
        assert bundle.verdict.passed


def test_a_bundle_that_trains_is_not_for_inference(deployed: dict[str, Deployed]) -> None:
    """A manifest with `output` must have what every program expects that only predicts."""
    manifest = open_bundle(deployed["board"].out).manifest
    predict = manifest.signatures["predict"]
    (x,) = predict.inputs
    entry = TensorEntry(name="w", role="frozen", dtype="float32", shape=(1,))
    for change in (
        {"signatures": {"predict": predict, "more": predict}},
        {"signatures": {"predict": replace(predict, inputs=(x, replace(x, name="z")))}},
        {"signatures": {"forward": predict}},
        {"tensors": (entry,)},
        {"schedule": (Record(signature="predict", source="x", target="y"),)},
    ):
        with refused("bundle.not-for-inference"):
            check_consistent(replace(manifest, **change), Path("manifest.json"))


def test_each_kind_gets_what_it_can_predict_with(deployed: dict[str, Deployed]) -> None:
    chosen = {kind: bundle.card.submodel for kind, bundle in deployed.items()}
    assert chosen == {
        "desktop": "full", "board": "low-rank:0.5", "sensor": "full", "phone": "full",
        "planned": "full",
    }  # fmt: skip
    assert "frozen layers" in deployed["sensor"].card.reason
    assert "personal" in deployed["phone"].card.reason
    # The budget of 61 MB is below the idle agent's 60 MB and the runtime's code.
    assert [kind for kind, bundle in deployed.items() if bundle.card.notes] == ["planned"]
    assert "budget of 61.0 MB" in deployed["planned"].card.notes[0]


def test_the_coordinator_signs_the_card(deployed: dict[str, Deployed], federation: Path) -> None:
    folder = deployed["board"].out
    content = (folder / "card.json").read_bytes()
    signer = json.loads(content)["signer"]
    key = Ed25519PublicKey.from_public_bytes(base64.b64decode(signer["key"]))
    signature = base64.b64decode((folder / "card.sig").read_text())
    key.verify(signature, b"edgetailor-card-1\n" + content)
    with pytest.raises(InvalidSignature):
        key.verify(signature, b"edgetailor-card-1\n" + content.replace(b"0.5", b"0.6"))
    assert (federation / "state" / KEY).is_file()


def wide() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(6 * 4 * 4, 10),
    )  # fmt: skip


def narrowed(model: nn.Sequential) -> nn.Sequential:
    """The network of the first half of the channels, with the weights of these."""
    narrow = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(3 * 4 * 4, 10),
    )  # fmt: skip
    state = model.state_dict()
    narrow.load_state_dict(
        {name: state[name][tuple(slice(n) for n in value.shape)]
         for name, value in narrow.state_dict().items()}
    )  # fmt: skip
    return narrow


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.conv(x))


def deep() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(*(Residual() for _ in range(4))), nn.Flatten(), nn.Linear(64, 10)
    )


def shallow(model: nn.Sequential) -> nn.Sequential:
    """The network of the first two of four blocks."""
    return nn.Sequential(model[0][:2], *model[1:])  # type: ignore[index]


@pytest.mark.parametrize(
    ("build", "spec", "reduced"), [(wide, "width:0.5", narrowed), (deep, "depth:0.5", shallow)]
)
def test_reduced_models_are_the_small_networks(
    build: Callable[[], nn.Sequential],
    spec: str,
    reduced: Callable[[nn.Sequential], nn.Module],
    tmp_path: Path,
) -> None:
    """From Python: a model without data and without a coordinator's key."""
    model = build()
    x = np.random.default_rng(0).random((5, *SHAPE), dtype=np.float32)
    done = et.deploy(model, spec, SHAPE, tmp_path / "out")
    assert (done.card.quality, done.card.signer, done.card.round) == (None, None, None)
    assert not (done.out / "card.sig").exists()
    assert by_card(done.out, x).shape == (5, 10)
    np.testing.assert_allclose(
        by_card(done.out, x), in_torch(reduced(model), x), rtol=1e-5, atol=1e-5
    )


class Mobile(nn.Module):
    """A depthwise convolution, convolutions with other paddings, and ReLU6."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU6()
        )
        self.each = nn.Sequential(
            nn.Conv2d(6, 6, 3, stride=2, padding=1, groups=6), nn.BatchNorm2d(6), nn.ReLU6()
        )
        self.wide = nn.Conv2d(6, 6, 3, padding=2, dilation=2)
        self.last = nn.Sequential(nn.Flatten(), nn.Linear(96, 5), nn.BatchNorm1d(5), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.each(self.first(x))
        return self.last(torch.relu(x + self.wide(x)))  # type: ignore[no-any-return]


def test_tflite_predicts_the_same(tmp_path: Path, trained: nn.Module) -> None:
    """Batch norms and activations are parts of the convolutions before them."""
    model = Mobile()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.running_mean.normal_()  # type: ignore[union-attr]
            module.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
            module.weight.data.normal_()
            module.bias.data.normal_()
    x, y = held_out()
    for name, net, most in (("mobile", model, 10), ("digits", trained, 9)):
        done = et.deploy(net, "full", SHAPE, tmp_path / name, data=(x, y % 5), format="tflite")
        np.testing.assert_allclose(by_card(done.out, x), in_torch(net, x), rtol=1e-5, atol=1e-5)
        assert done.card.quality is not None
        accuracy = (in_torch(net, x).argmax(1) == y % 5).mean()
        assert done.card.quality.accuracy == pytest.approx(accuracy)
        assert operators(done.out / "model.tflite") <= most
        assert open_bundle(done.out).manifest.runtime == "litert"


def named_tensors(file: Path) -> int:
    """The number of tensors with a name in a TFLite file."""
    from ai_edge_litert import schema_py_generated as schema

    graph = schema.Model.GetRootAs(file.read_bytes()).Subgraphs(0)
    return sum(graph.Tensors(n).Name() is not None for n in range(graph.TensorsLength()))


def operators(file: Path) -> int:
    """The number of operators in a TFLite file."""
    from ai_edge_litert import schema_py_generated as schema

    return int(schema.Model.GetRootAs(file.read_bytes()).Subgraphs(0).OperatorsLength())


def test_regressions_and_their_preparation(tmp_path: Path) -> None:
    """Numbers have no accuracy; the card has the rule by which a CSV file becomes samples."""
    rule = Series(columns=("a", "b", "c"), label="sold", mean=(1.0, 2.0, 3.0))
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    x, y = np.random.default_rng(0).random((2, 9, 3), dtype=np.float32)
    y = y[:, :1]
    done = et.deploy(
        model, "full", (3,), tmp_path / "out",
        training=et.TrainingConfig(loss="mse"), data=(x, y), preprocessing=rule,
    )  # fmt: skip
    assert (done.card.output.probabilities, done.card.output.class_axis) == ("numbers", None)
    assert done.card.quality is not None
    assert done.card.quality.accuracy is None
    right = float(np.mean((in_torch(model, x) - y) ** 2))
    assert done.card.quality.loss == pytest.approx(right, rel=1e-5)
    card = json.loads((done.out / "card.json").read_bytes())
    assert card["preprocessing"] | {"mean": []} == {
        "kind": "series", "columns": ["a", "b", "c"], "label": "sold", "classes": [],
        "channels": "last", "step": 0, "mean": [], "std": [],
    }  # fmt: skip


def test_what_is_refused_leaves_nothing(tmp_path: Path) -> None:
    model = wide()
    x, y = np.zeros((3, 1, 9, 9), np.float32), np.zeros(3, np.int64)
    with refused("data.wrong-shape"):
        et.deploy(model, "full", SHAPE, tmp_path / "out", data=(x, y))
    with refused("data.label-out-of-range"):
        et.deploy(model, "full", SHAPE, tmp_path / "out", data=(x[..., :8, :8], y + 10))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with refused("file.exists"):
        et.deploy(model, "full", SHAPE, tmp_path / "out")
    with refused("file.not-replaceable"):
        et.deploy(model, "full", SHAPE, tmp_path / "out", force=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]


@pytest.mark.parametrize(
    ("precision", "most"), [("float16", 0.53), ("int8", 0.30)], ids=["float16", "int8"]
)
@pytest.mark.parametrize("file_format", ["onnx", "tflite"])
def test_smaller_weights(
    precision: Literal["float16", "int8"],
    most: float,
    file_format: Literal["onnx", "tflite"],
    trained: nn.Module,
    tmp_path: Path,
) -> None:
    """The file shrinks, it still takes and gives float32, and loses less than a point."""
    if file_format == "tflite":
        pytest.importorskip("ai_edge_quantizer")
    train, (x, y) = deployed_digits.split_digits()
    done = et.deploy(
        trained, "full", SHAPE, tmp_path / "small",
        data=(x, y), calibration=train, format=file_format, precision=precision,
    )  # fmt: skip
    float32_bytes = 4 * sum(value.numel() for value in trained.state_dict().values())
    assert done.card.graph_bytes <= most * float32_bytes
    outputs, right = by_card(done.out, x), in_torch(trained, x)
    assert outputs.dtype == np.float32
    accuracy = float((outputs.argmax(1) == y).mean())
    assert done.card.quality is not None
    assert done.card.quality.accuracy == pytest.approx(accuracy)
    assert abs(accuracy - float((right.argmax(1) == y).mean())) <= 0.01
    # 8 bits have a step of 1/255 of the range; errors of layers add up.
    largest = 2e-3 if precision == "float16" else 0.1
    assert float(np.abs(outputs - right).max()) <= largest * float(np.abs(right).max())
    assert done.card.speed is not None
    assert (done.card.precision, done.card.calibrated_on) == (
        precision, 512 if precision == "int8" else None
    )  # fmt: skip
    assert "time relative to float32" in (done.out / "CARD.md").read_text()
    # Opening takes several times the file.
    memory = done.card.cost.memory_bytes
    assert memory == open_bundle(done.out).manifest.signatures["predict"].peak_bytes
    assert memory is not None
    assert memory > 10e6 + 2 * done.card.graph_bytes
    if (file_format, precision) == ("onnx", "int8"):
        check_integers(done.out / "predict.onnx")
    if file_format == "tflite":
        assert named_tensors(done.out / "model.tflite") <= 2  # the input and the output


@pytest.mark.parametrize("file_format", ["onnx", "tflite"])
def test_int8_includes_the_ranges_of_all_samples(
    file_format: Literal["onnx", "tflite"], tmp_path: Path
) -> None:
    """Files are often sorted: the first samples may be the smallest."""
    if file_format == "tflite":
        pytest.importorskip("ai_edge_quantizer")
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    x = np.random.default_rng(0).random((96, *SHAPE), dtype=np.float32)
    x *= np.linspace(0.1, 4, len(x), dtype=np.float32)[:, None, None, None]
    done = et.deploy(
        model, "full", SHAPE, tmp_path / "b", data=(x, in_torch(model, x)),
        training=et.TrainingConfig(loss="mse"), format=file_format, precision="int8",
    )  # fmt: skip
    right = in_torch(model, x)
    # Rounded samples, weights and outputs: a few steps of 1/255 of the range.
    assert float(np.abs(by_card(done.out, x) - right).max()) <= 0.02 * float(np.ptp(right))


def check_integers(file: Path) -> None:
    """Two products of 8-bit activations and these weights fit 16 bits, as AVX2 adds them.

    The file has no names for people, and no operators of other domains.
    """
    model = onnx.load(file)
    weights = [
        onnx.numpy_helper.to_array(tensor)
        for tensor in model.graph.initializer
        if tensor.data_type == onnx.TensorProto.INT8 and len(tensor.dims) > 1
    ]
    assert len(weights) == 5
    assert all(2 * 255 * np.abs(weight.astype(int)).max() < 2**15 for weight in weights)
    assert [(domain.domain, domain.version) for domain in model.opset_import] == [("", 18)]
    assert max(len(name) for node in model.graph.node for name in node.output) <= len("output")


def test_a_slower_precision_is_noted(tmp_path: Path) -> None:
    target = Target(tmp_path, "full", predicting_submodel("full"), precision="int8")
    fast = Speed(processor="Cortex-A72", seconds=1.0, float32_seconds=1.0)
    assert speed_notes(target, fast) == ()
    (note,) = speed_notes(target, replace(fast, seconds=1.5))
    assert "On this machine (Cortex-A72), a prediction takes 1.5 times as long" in note


def test_int8_needs_samples_and_its_quantizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wide()
    with refused("deploy.no-calibration"):
        et.deploy(model, "full", SHAPE, tmp_path / "out", precision="int8")
    monkeypatch.setitem(sys.modules, "ai_edge_quantizer", None)
    monkeypatch.delitem(sys.modules, "exporters.quantization.tflite_precision", raising=False)
    monkeypatch.delattr("exporters.quantization.tflite_precision", raising=False)
    with refused("export.quantizer-not-installed", "edgetailor[quantizer]"):
        et.deploy(model, "full", SHAPE, tmp_path / "out", format="tflite", precision="float16")
    broken = graph_of(b"no graph")
    with refused("export.cannot-quantize", precision="float16"):
        converted(broken, "float16", "predict", "x")
    assert list(tmp_path.iterdir()) == []


def graph_of(data: bytes) -> Graph:
    """An ONNX graph with this content."""
    return Graph("onnx", "predict.onnx", data, 0, len(data), footprint=lambda _: None)  # type: ignore[arg-type, return-value]
