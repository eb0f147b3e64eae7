"""TFLite: gradients of every coverage row, whole bundles on the agent, what is refused."""

import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import oracles
from bundles import CLASSES as TINY_CLASSES
from bundles import SAMPLE_SHAPE as TINY_SHAPE
from bundles import tiny_model, write_data
from commands import ROOT, edgetailor, run, run_code
from device_agent.formats.bundle import open_bundle
from device_agent.formats.update import read_update
from device_agent.runtime.litert_runtime import LitertSession
from dropping_model import CLASSES as DROPPING_CLASSES
from dropping_model import SHAPE as DROPPING_SHAPE
from dropping_model import Dropping
from edgetailor import Predictor, TrainingConfig, export, load_model, split
from exporters.decompositions import convolution
from exporters.onnx.onnx_writer import to_onnx
from exporters.programs.program import ProgramSignature
from layer_cases import (
    Case,
    Row,
    assert_close,
    check_predictions,
    combined_signature,
    open_session,
)
from models_for_tests import CLASSES, INPUT_SHAPE, smooth_cnn
from one_step import check_one_step
from operator_rows import GROUPS, ROWS, recorded
from oracles import Device, Plan
from parameters import half_quick, some_long
from profiles.cost_model.memory_rule import LITERT
from profiles.errors import BundleError
from refusals import refused
from row_kinds import of
from toolkit.submodels.global_model import from_model
from toolkit.submodels.hyperparameters import Loss, Optimizer
from training_steps import train_step
from trainings import evaluate_bundle, train_bundle, training_config
from uncovered_rows import REFUSED, check_refused

pytest.importorskip("ai_edge_litert", reason="needs the extras [tflite] and [litert]")

from ai_edge_litert.interpreter import Interpreter  # type: ignore[import-not-found]

from exporters.tflite.grouped_convolutions import grouped_convolution
from exporters.tflite.tflite_decompositions import weight_gradient
from exporters.tflite.tflite_writer import to_tflite

PLAN = Plan(batch_size=8, epochs=2, rate=0.1, momentum=0.9, weight_decay=0.0)
TRAINING = training_config(PLAN)
SPECS = ("full", "low-rank:0.5", "slice:residual")


# Their operators are those of other groups, or those of few models.
LONG = (
    *("attention", "max pooling", "transposed convolution", "Fourier transform", "grid sampling"),
    *("residual", "writes in place"),
)


@pytest.mark.parametrize("group", some_long(GROUPS, *(g for g in GROUPS if g in LONG)))
def test_gradients_on_litert(group: str, seed: int) -> None:
    check_on_litert(recorded(group, seed), seed)


@pytest.mark.long
@pytest.mark.parametrize("group", ROWS)
def test_gradients_of_all_rows(group: str, seed: int) -> None:
    check_on_litert(recorded(group, seed, every=True), seed)


# In one graph of all rows of arithmetic, LiteRT gives nan for atan; alone, it is right.
PREDICTED = [group for group in ROWS if group not in ("batch norm", "arithmetic")]


@pytest.mark.long
@pytest.mark.parametrize("group", PREDICTED)
def test_predictions_on_litert(group: str, seed: int) -> None:
    """What `predict` and `evaluate` run: PyTorch then chooses other operators for some layers."""
    cases = recorded(group, seed).items()
    check_predictions({n: c for n, c in cases if not list(c.layer.buffers())}, seed, in_litert)


def in_litert(
    signature: ProgramSignature, feeds: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    session = Interpreter(model_content=to_tflite([signature]), num_threads=1)
    runner = session.get_signature_runner(signature.name)
    known = runner.get_input_details()
    results: dict[str, np.ndarray] = runner(**{n: v for n, v in feeds.items() if n in known})
    return results


def check_on_litert(cases: Mapping[str, Case], seed: int) -> None:
    short = {f"r{number}": case for number, case in enumerate(cases.values())}
    data = to_tflite([combined_signature({n: c.signature for n, c in short.items()})])
    run = Interpreter(model_content=data, num_threads=1).get_signature_runner("together")
    feeds = {name: case.feeds(seed) for name, case in short.items()}
    results = run(**{f"{n}/{k}": t.numpy() for n, own in feeds.items() for k, t in own.items()})
    for (key, case), name in zip(short.items(), cases, strict=True):
        came = [torch.from_numpy(results[f"{key}/{p.name}"]) for p in case.signature.outputs]
        assert_close(case, came, case.expected(feeds[key]), name)


@pytest.mark.parametrize("name", half_quick(REFUSED))
def test_what_is_not_covered_is_refused_with_the_nearest_way(name: str) -> None:
    check_refused(name, lambda signature: to_tflite([signature]))


def test_a_use_without_a_form_is_refused_with_its_place() -> None:
    row = Row(of(lambda x: x - x[-1].sin()), (3, 4, 5))
    case = Case.of(row, record=True)
    with refused("export.unsupported-operator", signature="gradients") as caught:
        to_tflite([case.signature])
    # The message is torch's and ours: the line of the model, what is unsupported, and the remedy.
    assert re.search(
        r"test_tflite\.py, line \d+.* a batch can have any size.*--format onnx", str(caught.value)
    )


@pytest.mark.long
def test_dropout_is_as_in_onnxruntime(seed: int) -> None:
    """ONNX steps are held to PyTorch's with the same masks in test_seeded_random.py."""
    torch.manual_seed(seed)
    model = Dropping()
    train = train_step(model, DROPPING_SHAPE, momentum=0.0)
    ours = Interpreter(model_content=to_tflite([train]), num_threads=1)
    theirs = open_session(to_onnx(train))
    values = {n: v.detach().numpy() for n, v in model.named_parameters()}
    values["x"] = torch.randn(7, *DROPPING_SHAPE).numpy()
    values |= {"y": np.arange(7) % DROPPING_CLASSES, "rate": np.asarray(1, np.float32)}
    for fed in (seed % (2**31 - 1), 2**31 - 2):
        feeds = {**values, "seed": np.asarray(fed)}
        came = ours.get_signature_runner("train")(**feeds)
        names = [output.name for output in theirs.get_outputs()]
        for name, value in zip(names, theirs.run(None, feeds), strict=True):
            np.testing.assert_allclose(came[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("per_group", [1, 2])
def test_groups_do_not_make_a_convolution_larger(per_group: int) -> None:
    def operators(groups: int) -> list[int]:
        channels = groups * per_group
        x = grad = torch.zeros(2, channels, 6, 6)
        weight = torch.zeros(channels, per_group, 3, 3)
        window = convolution.Window([1, 1], [1, 1], [1, 1], groups)
        backward = make_fx(partial(weight_gradient, window=window))(grad, x, weight)
        forward = make_fx(partial(grouped_convolution, window=window))(x, weight)
        return [len(backward.graph.nodes), len(forward.graph.nodes)]

    assert operators(3) == operators(30)


def wide_kernels() -> nn.Module:
    """Its kernels' rows are of more slices than XNNPACK concatenates at once."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 11, padding=5), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(4 * 64, 10))


@pytest.mark.parametrize(
    "model", half_quick([partial(load_model, "toolkit.models:digits_cnn", seed=0), wide_kernels])
)
def test_xnnpack_takes_the_step_as_a_whole(model: Callable[[], nn.Module]) -> None:
    """Otherwise what is ready before an operator that it does not take is computed and kept."""
    train = train_step(model(), (1, 8, 8), momentum=0.9)
    run = Interpreter(model_content=to_tflite([train]), num_threads=1)
    run.allocate_tensors()
    names = [operator["op_name"] for operator in run._get_ops_details()]
    assert names.count("DELEGATE") == 1


def one_round(
    model: nn.Module, spec: str, format: str, data: Path, out: Path, seed: int
) -> Mapping[str, np.ndarray]:
    """The update of a device that trains `spec` once, exported in `format`."""
    submodel = split(model, spec, np.load(data)["x"].shape[1:], TRAINING)
    bundle = out / "bundle"
    export(submodel, from_model(model), bundle, format=format, verify=False)  # type: ignore[arg-type]
    train_bundle(bundle, str(data), out / "update", threads=1, seed=seed)
    return read_update(out / "update")[1]


def local_data(path: Path, count: int, shape: tuple[int, ...], classes: int, seed: int) -> Device:
    draw = np.random.default_rng(seed)
    x = draw.normal(0.3, 1.2, (count, *shape)).astype(np.float32)
    y = draw.integers(classes, size=count)
    np.savez(path, x=x, y=y)
    return Device(x, y, seed=seed % 1000)


@pytest.fixture(scope="module")
def smooth(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Sequential, Path]:
    """A model and its bundle."""
    model, out = smooth_cnn(), tmp_path_factory.mktemp("smooth") / "bundle"
    submodel = split(model, "full", INPUT_SHAPE, TRAINING)
    export(submodel, from_model(model), out, format="tflite", verify=False)
    return model, out


@pytest.mark.parametrize("count", [21, 17, 9])  # last batches of 5, of 9 and of 9: one joins
def test_the_last_batch_is_as_in_pytorch(
    smooth: tuple[nn.Sequential, Path], count: int, seed: int, tmp_path: Path
) -> None:
    model, bundle = smooth
    data, out = tmp_path / "data.npz", tmp_path / "update"
    device = local_data(data, count, INPUT_SHAPE, CLASSES, seed)
    old, expected = oracles.state_of(model), oracles.train_full(model, device, PLAN)
    train_bundle(bundle, str(data), out, threads=1, seed=device.seed)
    came = read_update(out)[1]
    assert came.keys() == expected.keys()
    oracles.assert_trained(came, expected, old)


@pytest.mark.parametrize("spec", some_long(SPECS, "low-rank:0.5", "slice:residual"))
def test_a_round_is_as_in_onnxruntime(spec: str, seed: int, tmp_path: Path) -> None:
    """ONNX bundles are held to plain PyTorch in tests/toolkit/aggregation/test_round_oracle.py.

    Smooth activations: at a ReLU's kink, two orders of the same sum give two gradients.
    """
    torch.manual_seed(seed)
    model = smooth_cnn()
    data = tmp_path / "data.npz"
    local_data(data, 21, INPUT_SHAPE, CLASSES, seed)
    ours = one_round(model, spec, "tflite", data, tmp_path / "tflite", 3)
    theirs = one_round(model, spec, "onnx", data, tmp_path / "onnx", 3)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert np.linalg.norm(ours[name] - value) <= 1e-4 * np.linalg.norm(value) + 1e-6, name


@pytest.mark.long
def test_a_round_of_cp(seed: int, tmp_path: Path) -> None:
    """Its training amplifies rounding over the steps, so each signature is compared by itself."""
    model = load_model("toolkit.models:digits_cnn", seed=seed % 1000)
    submodel, out = split(model, "cp:2.0", (1, 8, 8), TRAINING), tmp_path / "bundle"
    exported = export(submodel, from_model(model), out, format="tflite")
    assert exported.verdict is not None
    assert exported.verdict.error <= 1e-3
    local_data(tmp_path / "data.npz", 21, (1, 8, 8), 10, seed)
    done = train_bundle(out, str(tmp_path / "data.npz"), tmp_path / "update", threads=1)
    assert done.personal
    assert np.isfinite(done.record.loss_last)


@pytest.mark.parametrize(
    ("loss", "outputs", "optimizer"),
    half_quick(
        [("cross-entropy", 4, "adamw"), ("cross-entropy", 1, "adam"), ("mse", 3, "nesterov")]
    ),
)
def test_losses_and_optimizers(
    loss: Loss, outputs: int, optimizer: Optimizer, seed: int, tmp_path: Path
) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, outputs))
    training = TrainingConfig(
        batch_size=8, weight_decay=0.1, loss=loss, optimizer=optimizer, proximal=0.1
    )
    submodel = split(model, "full", (1, 4, 4), training)
    out = tmp_path / "bundle"
    exported = export(submodel, from_model(model), out, format="tflite")
    assert exported.verdict is not None
    assert exported.verdict.error <= 1e-3
    x = torch.randn(21, 1, 4, 4)
    y = torch.randn(21, outputs) if loss == "mse" else torch.randint(max(outputs, 2), (21,))
    np.savez(tmp_path / "data.npz", x=x.numpy(), y=y.numpy())
    evaluation = evaluate_bundle(out, str(tmp_path / "data.npz"), threads=1)
    output = model(x).detach()
    if loss == "mse":
        expected, correct = functional.mse_loss(output, y), None
    elif outputs == 1:
        expected = functional.binary_cross_entropy_with_logits(output[:, 0], y.float())
        correct = int(((output[:, 0] > 0) == (y == 1)).sum())
    else:
        expected = functional.cross_entropy(output, y)
        correct = int((output.argmax(1) == y).sum())
    assert (evaluation.samples, evaluation.correct) == (21, correct)
    assert evaluation.loss == pytest.approx(float(expected), rel=1e-5)


def export_tiny(out: Path) -> None:
    model, source = tiny_model()
    export(split(model, "full", TINY_SHAPE, TRAINING), source, out, format="tflite")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A verified TFLite bundle of the tiny model."""
    out = tmp_path_factory.mktemp("tflite") / "bundle"
    export_tiny(out)
    return out


def test_a_bundle_is_one_file_with_named_signatures(bundle: Path) -> None:
    assert {path.name for path in bundle.iterdir()} == {
        "manifest.json",
        "model.tflite",
        "weights.safetensors",
    }
    manifest = open_bundle(bundle).manifest
    assert manifest.runtime == "litert"
    assert {s.graph for s in manifest.signatures.values()} == {"model.tflite"}
    train, predict = (manifest.signatures[name].peak_bytes for name in ("train", "predict"))
    assert train is not None
    assert predict is not None
    assert train > predict > LITERT.session_bytes
    listed = Interpreter(str(bundle / "model.tflite")).get_signature_list()
    for name, signature in manifest.signatures.items():
        assert set(listed[name]["inputs"]) == {port.name for port in signature.inputs}
        assert set(listed[name]["outputs"]) == {port.name for port in signature.outputs}


def test_same_export_gives_the_same_bytes_and_no_paths(bundle: Path, tmp_path: Path) -> None:
    export_tiny(tmp_path / "again")
    for path in bundle.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name
    data = (bundle / "model.tflite").read_bytes()
    assert str(ROOT).encode() not in data
    assert b".py" not in data


def test_one_session_runs_batches_of_any_size(bundle: Path, seed: int) -> None:
    model = tiny_model()[0].eval()
    opened = open_bundle(bundle)
    signature = opened.manifest.signatures["predict"]
    state = opened.load(port.state for port in signature.inputs if port.state is not None)
    session = LitertSession(bundle / "model.tflite", "predict", 1)
    for count in (8, 3, 1, 8):
        x = torch.randn(count, *TINY_SHAPE, generator=torch.Generator().manual_seed(seed))
        (came,) = session.run({"x": x.numpy(), **state}).values()
        expected: Tensor = model(x).detach()
        assert came.shape == (count, TINY_CLASSES)
        torch.testing.assert_close(torch.from_numpy(came), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", ["full", "slice:hidden"])
def test_new_state_is_copied_over_the_old(spec: str, seed: int, tmp_path: Path) -> None:
    """Batches of two sizes, because LiteRT moves its tensors for another size."""
    model, source = tiny_model()
    submodel, bundle = split(model, spec, TINY_SHAPE, TRAINING), tmp_path / "bundle"
    export(submodel, source, bundle, format="tflite", verify=False)
    opened = open_bundle(bundle)
    trained = [name for name, own in opened.manifest.signatures.items() if own.in_place]
    assert trained == ["train"]
    signature = opened.manifest.signatures["train"]
    over = signature.overwritten()
    assert set(over) == {port.name for port in signature.outputs if port.state is not None}
    draw = np.random.default_rng(seed)
    ports = {port.kind: port for port in signature.inputs}

    def batch(count: int) -> dict[str, np.ndarray]:
        x = draw.standard_normal((count, *(ports["samples"].shape[1:])), dtype=np.float32)  # type: ignore[arg-type]
        y = draw.integers(TINY_CLASSES, size=count)
        return {ports["samples"].name: x, ports["labels"].name: y, "rate": np.float32([0.1])[0]}

    stored = opened.load(e.name for e in opened.manifest.tensors if e.stored)
    for_port = {
        port.name: stored.get(str(port.state), np.zeros(port.shape, port.dtype))  # type: ignore[arg-type]
        for port in signature.inputs
        if port.kind == "state"
    }
    ours = {name: value.copy() for name, value in for_port.items()}
    kept = dict(ours)
    plain = LitertSession(bundle / "model.tflite", "train", 1)
    session = LitertSession(bundle / "model.tflite", "train", 1)
    for count in (8, 8, 3, 8):
        given = batch(count)
        expected = plain.run({**given, **for_port})
        came = session.run({**given, **ours}, over)
        assert came.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(came[name], value, err_msg=name)
        for name, old in over.items():
            assert came[name] is kept[old]
            assert expected[name] is not for_port[old]
            for_port[old] = expected[name]


def test_a_file_that_litert_refuses(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "model.tflite").write_bytes(b"no graph")
    with pytest.raises(BundleError, match=r"model\.tflite is refused by ai-edge-litert \d"):
        LitertSession(tmp_path / "model.tflite", "predict", 1)
    with pytest.raises(BundleError, match=r"refused by ai-edge-litert .*unknown"):
        LitertSession(bundle / "model.tflite", "unknown", 1)


def test_without_litert_the_remedy_is_named(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ai_edge_litert.interpreter", None)
    with pytest.raises(BundleError, match=r"pip install '\.\[litert\]'.*--format onnx"):
        LitertSession(bundle / "model.tflite", "predict", 1)


def test_the_commands(tmp_path: Path) -> None:
    done = edgetailor(
        "export", "toolkit.models:digits_cnn", "--input-shape", "1,8,8", "--batch", "8",
        "--format", "tflite", "--out", "bundle", "--json", "--no-verify", cwd=tmp_path,
    ).succeeded()  # fmt: skip
    described = json.loads(done.stdout)
    assert [s["name"] for s in described["signatures"]] == ["train", "predict", "evaluate"]
    assert all(s["operators"] > 10 and s["graph_bytes"] > 1000 for s in described["signatures"])
    draw = np.random.default_rng(0)
    x = draw.standard_normal((21, 1, 8, 8), dtype=np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=draw.integers(10, size=21))
    for arguments, said in (
        (["train", "bundle", "--data", "data.npz", "--out", "update"], "full: 3 steps on 21"),
        (["profile", "bundle", "--threads", "1"], "threads 1, ai-edge-litert "),
    ):
        ended = run("edgetailor-agent", *arguments, cwd=tmp_path).succeeded()
        assert said in ended.stdout


def test_the_device_needs_no_training_framework(bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(bundle, tmp_path / "bundle")
    write_data(tmp_path / "data.npz")
    code = (
        "import sys; from device_agent.training.standalone_training import train;"
        "train('bundle', 'data.npz', 'update', threads=1); print(*sys.modules)"
    )
    done = run_code(code, cwd=tmp_path).succeeded()
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "ai_edge_litert" in loaded
    assert not loaded & {"torch", "onnx", "onnxscript", "exporters", "toolkit", "flatbuffers"}


class Angles(nn.Module):
    """Angles whose second operand is a number, a vector or as large as the first."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.linspace(-2, 2, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x.atan(), x.atan2(self.v), torch.atan2(self.v[:1], x), x.atan2(x + 1)], 1)


def test_angles_read_no_memory_beyond_their_operands(seed: int, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    model, x = Angles(), torch.randn(64, 6)
    submodel = split(model, "full", (6,), TrainingConfig(loss="mse"))
    export(submodel, from_model(model), tmp_path / "b", format="tflite", verify=False)
    output = Predictor(tmp_path / "b").predict(x.numpy())
    with torch.no_grad():
        np.testing.assert_allclose(output, model(x).numpy(), rtol=1e-5, atol=1e-5)


class OfTheBatch(nn.Module):
    """Tensors filled with the size of the batch, parts of a joined batch, and extremes by place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        size, h = x.shape[0], self.first(x)
        both = torch.cat([h, h.sin(), h.cos()])
        h = both[size:][:size] * both[:size] / torch.full_like(h, 3 * size)
        to = torch.tensor([0, 2, 2, 0, 3, 2]).expand_as(h)
        largest = torch.zeros_like(h).scatter_reduce(1, to, h.detach(), "amax", include_self=False)
        smallest = h.detach().scatter_reduce(1, to, h.detach().cos(), "amin")
        return self.last(h + largest * h - smallest)


def test_a_step_with_tensors_of_the_size_of_the_batch(seed: int, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    check_one_step(OfTheBatch(), (4,), None, "tflite", tmp_path)
