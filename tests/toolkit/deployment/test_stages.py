"""Where the whole graph does not fit the memory of devices that train a slice, stages predict."""

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace as changed
from torch import nn

from commands import ROOT
from device_agent.formats.bundle import open_bundle
from device_agent.formats.manifest import Manifest, Record
from device_agent.formats.manifest_validation import check_consistent
from device_agent.inference.predictor import Predictor
from device_agent.inference.release_trial import try_release
from device_agent.training.batching import held_out
from device_agent.training.training_options import TrainingOptions
from refusals import refused
from toolkit.deployment.card_fields import Format, Precision
from toolkit.deployment.deploy import Deployed, deploy_to
from toolkit.deployment.predicting_submodel import predicting_submodel
from toolkit.deployment.targets import Target, needed_bytes
from toolkit.deployment.trained_model import TrainedModel
from toolkit.submodels.global_model import from_model
from toolkit.submodels.hyperparameters import TrainingConfig

SHAPE = (1, 8, 8)
SPEC = "slice:5,recording=float16,frozen=int8"


def network(seed: int = 0) -> nn.Sequential:
    """Large enough that weights, not the runtime's code, decide the memory."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(),
        nn.Linear(1024, 300), nn.Linear(300, 300), nn.Dropout(0.5), nn.ReLU(), nn.Linear(300, 10),
    )  # fmt: skip
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm2d)
    norm.running_mean = torch.randn(16)
    norm.running_var = torch.rand(16) + 0.5
    return model


def samples(seed: int, n: int = 70) -> np.ndarray:
    return np.random.default_rng(seed).random((n, *SHAPE), dtype=np.float32)


def in_torch(model: nn.Module, x: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(torch.from_numpy(x)).numpy()  # type: ignore[no-any-return]


def labelled(model: nn.Module, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Samples with labels, three quarters of which are those that the model predicts."""
    y = in_torch(model, x).argmax(1)
    y[::4] = (y[::4] + 1) % 10
    return x, y


def trained(model: nn.Module, data: tuple[np.ndarray, np.ndarray] | None = None) -> TrainedModel:
    return TrainedModel("net", model, from_model(model), SHAPE, TrainingConfig(), data=data)


def deployed(
    model: nn.Module,
    out: Path,
    spec: str,
    file_format: Format = "onnx",
    precision: Precision = "float32",
    data: tuple[np.ndarray, np.ndarray] | None = None,
    memory: int = 1,
) -> Deployed:
    """The bundle for devices with this much memory, in bytes: for a stage at a time by default."""
    target = Target(
        out,
        spec,
        predicting_submodel(spec),
        memory=memory,
        format=file_format,
        precision=precision,
    )
    return deploy_to(trained(model, data), target, lambda _: None)


def probabilities(logits: np.ndarray) -> np.ndarray:
    return torch.softmax(torch.from_numpy(logits), 1).numpy()


@pytest.mark.parametrize("file_format", ["onnx", "tflite"])
def test_stages_predict_what_pytorch_predicts(
    file_format: Format, tmp_path: Path, seed: int
) -> None:
    """The stages are those of the slice, but their numbers and weights are float32."""
    if file_format == "tflite":
        pytest.importorskip("ai_edge_litert", reason="needs the extras [tflite] and [litert]")
    model, x = network(seed), samples(seed)
    data = labelled(model, x)
    done = deployed(model, tmp_path / "b", SPEC, file_format, data=data)
    card = json.loads((done.out / "card.json").read_bytes())
    files = [graph["file"] for graph in card["graphs"]]
    assert len(files) > 1
    assert set(files) | {"manifest.json", "card.json", "CARD.md"} == {
        path.name for path in done.out.iterdir()
    }
    assert (card["submodel"], card["trained"]) == ("slice:5", SPEC)
    assert f"it runs in {len(files)} stages, one after another" in card["reason"]
    assert "with one graph in memory at a time" in (done.out / "CARD.md").read_text()
    assert card["graph_bytes"] == sum((done.out / file).stat().st_size for file in files)
    assert card["quality"]["accuracy"] == pytest.approx(
        (in_torch(model, x).argmax(1) == data[1]).mean()
    )
    right = probabilities(in_torch(model, x))
    largest = card["cost"]["memory_bytes"]
    for limit in (None, 10**12):
        predictor = Predictor(done.out, threads=1, max_memory=limit)
        np.testing.assert_allclose(predictor.predict(x), right, atol=1e-5)
        assert predictor.predicted_bytes is not None
        # Without a limit, too, only one stage is open.
        assert (predictor.predicted_bytes == largest) == (limit is None)


@pytest.mark.parametrize("precision", ["float16", "int8"])
@pytest.mark.parametrize("file_format", ["onnx", "tflite"])
def test_stages_have_smaller_weights_too(
    file_format: Format, precision: Precision, tmp_path: Path, seed: int
) -> None:
    """Later stages are calibrated on what the stages before them give."""
    if file_format == "tflite":
        pytest.importorskip("ai_edge_quantizer")
    model, x = network(seed), samples(seed)
    done = deployed(model, tmp_path / "b", SPEC, file_format, precision, labelled(model, x))
    assert len(done.card.graphs) > 1
    float32_bytes = 4 * sum(value.numel() for value in model.state_dict().values())
    most = 0.53 if precision == "float16" else 0.30
    assert done.card.graph_bytes <= most * float32_bytes
    assert done.card.speed is not None
    right = in_torch(model, x)
    logits = np.log(Predictor(done.out, threads=1).predict(x))
    logits += (right - logits).mean(1, keepdims=True)  # probabilities do not have the offset
    largest = 2e-3 if precision == "float16" else 0.1
    assert float(np.abs(logits - right).max()) <= largest * float(np.abs(right).max())


def test_what_other_slices_predict_with(tmp_path: Path, seed: int) -> None:
    """A second family after the cut: its factors predict, as the devices train them."""
    model, x = network(seed), samples(seed)
    layer = model[5]
    assert isinstance(layer, nn.Linear)
    # Of rank 20, so that factors of rank 30 are exact.
    layer.weight.data = torch.randn(300, 20) @ torch.randn(20, 300) / 50
    done = deployed(model, tmp_path / "b", "slice:5+low-rank:0.1")
    assert done.card.submodel == "slice:5+low-rank:0.1"
    assert "after the cut it is reduced to the devices' low-rank submodel" in done.card.reason
    assert done.card.graph_bytes < 4 * (1024 * 300 + 2 * 30 * 300) + 50_000
    got = Predictor(done.out, threads=1).predict(x)
    np.testing.assert_allclose(got, probabilities(in_torch(model, x)), atol=1e-5)


def test_memory_decides(tmp_path: Path) -> None:
    """One graph where it just fits, stages with a byte less; other submodels have no stages."""
    model = network()
    free = deployed(model, tmp_path / "free", SPEC, memory=10**12)
    assert free.card.reason.endswith("it fits the memory of the devices in one graph")
    assert free.card.cost.memory_bytes is not None
    least = needed_bytes(free.card.cost.memory_bytes)
    whole = deployed(model, tmp_path / "whole", SPEC, memory=least)
    stages = deployed(model, tmp_path / "stages", SPEC, memory=least - 1)
    assert [len(bundle.card.graphs) for bundle in (free, whole, stages)] == [1, 1, 3]
    assert stages.card.cost.memory_bytes is not None
    assert stages.card.cost.memory_bytes < free.card.cost.memory_bytes
    assert [bundle.card.notes for bundle in (free, whole, stages)] == [(), (), ()]
    full = deployed(model, tmp_path / "full", "full", memory=least - 1)
    assert len(full.card.graphs) == len(full.card.notes) == 1


GROWTH = """
import sys
from pathlib import Path
import numpy as np
from device_agent.inference.predictor import Predictor

def highest() -> int:
    [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x]
    return int(line.split()[1]) * 1024

x = np.zeros((70, 1, 8, 8), np.float32)
Path("/proc/self/clear_refs").write_text("5")  # forget the highest memory until now
before = highest()
predictor = Predictor(sys.argv[1], threads=1)
predictor.predict(x)
print(highest() - before, predictor.predicted_bytes)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("precision", ["float32", "float16", "int8"])
@pytest.mark.parametrize("file_format", ["onnx", "tflite"])
def test_a_process_grows_by_the_largest_stage(
    file_format: Format, precision: Precision, tmp_path: Path
) -> None:
    """Three stages with one weight of 25 MB each; the last of several graphs has a small one."""
    if file_format == "tflite":
        pytest.importorskip("ai_edge_quantizer")
    torch.manual_seed(0)
    wide = [layer for _ in range(3) for layer in (nn.Linear(2500, 2500), nn.ReLU())]
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2500), nn.ReLU(), *wide, nn.Linear(2500, 10))
    data = samples(0), np.zeros(70, np.int64)
    done = deployed(model, tmp_path / "b", "slice:7", file_format, precision, data)
    assert len(done.card.graphs) == 4
    command = [sys.executable, "-c", GROWTH, str(done.out)]

    def grown() -> int:
        said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
        measured, predicted = map(int, said.split())
        assert predicted == done.card.cost.memory_bytes
        return measured

    # The kernel may take pages of Python's code from a process, which come back and count again.
    measured = statistics.median(grown() for _ in range(3))
    assert done.card.cost.memory_bytes is not None
    assert 0.5 < measured / done.card.cost.memory_bytes < 1.05


def test_a_release_in_stages_is_tried_like_any_other(tmp_path: Path, seed: int) -> None:
    """Its counts are those of PyTorch on the samples of the trial, a tenth of all."""
    model = network(seed)
    x, y = labelled(model, samples(seed, 90))
    done = deployed(model, tmp_path / "b", SPEC)
    result = try_release((x, y), TrainingOptions(threads=1), done.out, None, None)
    assert (result.reason, result.before) == (None, None)
    assert result.after is not None
    tried = held_out(len(y), 0.1)
    right = in_torch(model, x[tried]).argmax(1) == y[tried]
    assert (result.after.samples, result.after.correct) == (len(tried), int(right.sum()))


class Tied(nn.Module):
    """Both sides of the cut read the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.wide = nn.Linear(64, 64), nn.Linear(64, 2000)
        self.narrow, self.last = nn.Linear(2000, 64), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.wide(torch.relu(self.both(x.flatten(1)))))
        return self.last(torch.relu(self.both(self.narrow(x))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("file_format", ["onnx", "tflite"])
def test_every_stage_holds_what_it_reads(file_format: Format, tmp_path: Path, seed: int) -> None:
    if file_format == "tflite":
        pytest.importorskip("ai_edge_litert", reason="needs the extras [tflite] and [litert]")
    torch.manual_seed(seed)
    model, x = Tied(), samples(seed)
    done = deployed(model, tmp_path / "b", "slice:narrow", file_format)
    assert len(done.card.graphs) > 1
    assert done.card.graph_bytes > 4 * (sum(p.numel() for p in model.parameters()) + 64 * 64)
    got = Predictor(done.out, threads=1).predict(x)
    np.testing.assert_allclose(got, probabilities(in_torch(model, x)), atol=1e-5)


def staged(manifest: Manifest) -> tuple[Sequence[Record], Manifest]:
    return [i for i in manifest.schedule if isinstance(i, Record)], manifest


def test_stages_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    done = deployed(network(), tmp_path / "b", SPEC)
    (first, *rest), manifest = staged(open_bundle(done.out).manifest)
    signature = manifest.signatures[first.signature]
    (result,) = signature.outputs
    fits_not = changed(signature, outputs=(changed(result, shape=(None, 7)),))
    for change, code in (
        ({"schedule": ()}, "bundle.not-for-inference"),
        ({"schedule": (first, *rest, changed(first, target="more"))}, "bundle.not-for-inference"),
        ({"signatures": manifest.signatures | {first.signature: fits_not}},
         "bundle.wrong-prediction"),
    ):  # fmt: skip
        with refused(code):
            check_consistent(changed(manifest, **change), Path("manifest.json"))
