"""OpenVINO on bundles for ONNX Runtime: it trains to the same numbers, and says what it cannot."""

import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

from bundles import SAMPLE_SHAPE, TRAINING, BundleOf, write_data
from commands import Agent
from device_agent.formats.bundle import Bundle, open_bundle
from device_agent.formats.manifest import Port, Record
from device_agent.formats.update import TENSORS
from device_agent.runtime import openvino_probe, openvino_runtime
from device_agent.runtime.openvino_runtime import BATCH_SIZES, OpenvinoSession
from device_agent.runtime.runtime_choice import open_session
from device_agent.training.memory_estimate import training_bytes
from device_agent.training.runtime_option import with_runtime
from device_agent.training.schedule_interpreter import OnEpoch
from device_agent.training.standalone_training import train
from edgetailor import split
from exporters.export import export
from models_for_tests import CLASSES, INPUT_SHAPE, Reader, smooth_cnn
from profiles.cost_model.memory_rule import OPENVINO
from refusals import refused
from toolkit.submodels.global_model import from_model

pytest.importorskip("openvino", reason="needs the extra [openvino]")

TOLERANCE = 1e-5
"""Of a tensor's largest number: float32 sums in another order, through two epochs."""
SPECS = ("full", "low-rank:0.5", "slice:residual.conv", "width:0.5", "cp:2.0", "pfedme")


def export_spec(model: nn.Module, spec: str, shape: tuple[int, ...], out: Path) -> Path:
    submodel, source = split(model, spec, shape, TRAINING), from_model(model)
    export(submodel.program, submodel.cut(source), out, base=source.fingerprint(), check=False)
    return out


@pytest.fixture(scope="module", params=SPECS)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of every family. Its model has no kinks.

    At a kink, such as that of a ReLU, rounding decides which of two gradients is taken.
    """
    torch.manual_seed(0)
    out = tmp_path_factory.mktemp("bundles") / request.param.partition(":")[0]
    return export_spec(smooth_cnn(), request.param, INPUT_SHAPE, out)


def check_same(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        limit = TOLERANCE * max(1e-3, float(np.abs(value).max()))
        assert np.abs(ours[name] - value).max() <= limit, name


def feed(port: Port, bundle: Bundle, order: np.random.Generator) -> np.ndarray:
    """Weights of the bundle, and random numbers for what a device has."""
    shape = [4 if size is None else size for size in port.shape]
    if port.kind == "labels":
        return order.integers(CLASSES, size=shape)
    if port.state is not None and bundle.entry(port.state).stored:
        return bundle.load([port.state])[port.state]
    return np.asarray(order.uniform(0.05, 0.3, shape), np.float32)


def test_every_signature_gives_what_onnxruntime_gives(bundle: Path) -> None:
    opened, order = open_bundle(bundle), np.random.default_rng(0)
    for name, signature in opened.manifest.signatures.items():
        feeds = {port.name: feed(port, opened, order) for port in signature.inputs}
        ours, theirs = (
            open_session(runtime, opened.graph(name), name, 1).run(
                {key: array.copy() for key, array in feeds.items()}, signature.overwritten()
            )
            for runtime in ("openvino", "onnx")
        )
        check_same(ours, theirs)


def test_every_family_trains_as_with_onnxruntime(bundle: Path, tmp_path: Path) -> None:
    """Of 19 samples, an epoch's last batch is smaller.

    Of the factors of `cp` only the loss is compared: Adam divides a gradient by its own size, so
    one that is zero but for rounding becomes a step of full length.
    """
    order = np.random.default_rng(0)
    x = order.standard_normal((21, *INPUT_SHAPE), dtype=np.float32)
    data = (x, order.integers(CLASSES, size=21))
    records, personal = {}, {}
    for runtime in ("onnxruntime", "openvino"):
        personal[runtime] = tmp_path / f"{runtime}.safetensors"
        records[runtime] = train(
            *(bundle, data, tmp_path / runtime),
            **{"personal": personal[runtime], "runtime": runtime, "threads": 1, "validation": 0.1},
        )
    ours, theirs = records["openvino"], records["onnxruntime"]
    assert (ours.samples, ours.steps) == (theirs.samples, theirs.steps) == (19, 10)
    adam = bundle.name == "cp"
    within = 1e-2 if adam else TOLERANCE
    assert ours.loss_last == pytest.approx(theirs.loss_last, rel=within)
    assert ours.validation[-1].loss == pytest.approx(theirs.validation[-1].loss, rel=within)
    if not adam:
        check_same(*(load_file(tmp_path / name / TENSORS) for name in ("openvino", "onnxruntime")))
    if bundle.name == "pfedme":
        check_same(*map(load_file, (personal["openvino"], personal["onnxruntime"])))


def test_dropout_is_refused(tmp_path: Path) -> None:
    """Its masks are hashes in 64-bit integers; OpenVINO would give others, without an error."""
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(36, 3))
    bundle = export_spec(model, "full", SAMPLE_SHAPE, tmp_path / "bundle")
    with refused("bundle.no-dropout", runtime="openvino"):
        train(bundle, "never read", tmp_path / "update", runtime="openvino")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="make test-arm64 has the other answer")
def test_convolutions_take_new_kernels() -> None:
    assert not openvino_probe.keeps_kernels()


def test_convolutions_that_keep_their_kernels_are_refused(
    bundle_of: BundleOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openvino_runtime, "keeps_kernels", lambda: True)
    with refused("bundle.kept-weights", graph="train.onnx"):
        OpenvinoSession(open_bundle(bundle_of("full")).graph("train"), 1)


def test_convolutions_with_fixed_kernels_may_keep_them(
    bundle_of: BundleOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stage that records has its weights inside, and the classifier has no convolution."""
    monkeypatch.setattr(openvino_runtime, "keeps_kernels", lambda: True)
    bundle = open_bundle(bundle_of("slice"))
    stages = [one.signature for one in bundle.manifest.schedule if isinstance(one, Record)]
    for name in (*stages, "train"):
        OpenvinoSession(bundle.graph(name), 1)


class Stopped(KeyboardInterrupt):
    """Stands for the user's Ctrl-C."""


def stop(epoch: int, of: int, loss: float) -> None:
    if epoch == 1:
        raise Stopped


@pytest.mark.parametrize("family", ["slice", "cp"])
def test_an_interrupted_training_continues_bit_for_bit(
    family: str, bundle_of: BundleOf, data: str, tmp_path: Path
) -> None:
    def run(name: str, on_epoch: OnEpoch) -> dict[str, np.ndarray]:
        out, own = tmp_path / name, tmp_path / f"{name}.safetensors"
        train(
            *(bundle_of(family), data, out),
            **{"personal": own, "runtime": "openvino", "threads": 1, "on_epoch": on_epoch},
        )
        return load_file(out / TENSORS)

    heard: list[int] = []
    with pytest.raises(Stopped):
        run("stopped", stop)
    found = run("stopped", lambda epoch, of, loss: heard.append(epoch))
    assert heard == [2]
    whole = run("whole", lambda epoch, of, loss: None)
    assert found.keys() == whole.keys()
    assert all(np.array_equal(found[name], value) for name, value in whole.items())


def test_a_checkpoint_of_another_runtime_is_not_continued(
    bundle_of: BundleOf, data: str, tmp_path: Path
) -> None:
    heard: list[int] = []
    with pytest.raises(Stopped):
        train(bundle_of("full"), data, tmp_path / "u", threads=1, on_epoch=stop)
    train(
        *(bundle_of("full"), data, tmp_path / "u"),
        runtime="openvino",
        threads=1,
        on_epoch=lambda epoch, of, loss: heard.append(epoch),
    )
    assert heard == [1, 2]


def test_a_loop_over_time_is_refused(tmp_path: Path) -> None:
    """OpenVINO's reader of ONNX takes no loop whose body reads tensors from around it."""
    bundle = export_spec(Reader(), "full", SAMPLE_SHAPE, tmp_path / "bundle")
    x, y = np.zeros((4, *SAMPLE_SHAPE), np.float32), np.zeros(4, np.int64)
    with refused("bundle.unusable-graph", graph="train.onnx") as error:
        train(bundle, (x, y), tmp_path / "update", runtime="openvino")
    assert "Scan" in str(error.value)
    assert "--runtime onnxruntime" in str(error.value)


def test_batch_sizes_are_kept_and_forgotten(bundle_of: BundleOf) -> None:
    bundle = open_bundle(bundle_of("full"))
    session = OpenvinoSession(bundle.graph("predict"), 1)
    ports = bundle.manifest.signatures["predict"].inputs
    feeds = {p.name: bundle.load([p.state])[p.state] for p in ports if p.state is not None}
    (samples,) = (port.name for port in ports if port.kind == "samples")
    x = np.random.default_rng(0).standard_normal((5, *SAMPLE_SHAPE), dtype=np.float32)
    (whole,) = session.run({**feeds, samples: x}).values()
    for count in (1, 2, 3, 5, 1):
        (found,) = session.run({**feeds, samples: x[:count]}).values()
        np.testing.assert_allclose(found, whole[:count], rtol=1e-5, atol=1e-6)
        assert len(session._compiled) <= BATCH_SIZES


def test_without_the_package(
    bundle_of: BundleOf, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with refused("bundle.runtime-missing", runtime="openvino"):
        train(bundle_of("full"), data, tmp_path / "update", runtime="openvino")


def test_nothing_is_reported_to_openvinos_maker() -> None:
    code = (
        "import sys; from device_agent.runtime.openvino_runtime import load_core; load_core(); "
        "print(sorted(m for m in sys.modules if 'telemetry' in m or 'ovc' in m))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_memory_is_that_of_openvino(bundle_of: BundleOf) -> None:
    plain = open_bundle(bundle_of("full"))
    chosen = with_runtime(plain, "openvino")
    assert (chosen.sha256, chosen.manifest.runtime) == (plain.sha256, "openvino")
    assert with_runtime(plain, "onnxruntime") is with_runtime(plain, None) is plain
    more, less = training_bytes(chosen.manifest), training_bytes(plain.manifest)
    assert more is not None
    assert less is not None
    assert more[0] > OPENVINO.session_bytes > less[0]


def test_the_commands_take_it(agent: Agent, bundle_of: BundleOf, tmp_path: Path) -> None:
    data, bundle = write_data(tmp_path / "local.npz"), bundle_of("full")
    options = ("--runtime", "openvino", "--threads", 1)
    done = agent("train", bundle, "--data", data, "--out", "update", *options)
    assert (done.code, "10 steps on 21 samples" in done.stdout) == (0, True)
    done = agent("profile", bundle, "--runs", 5, *options)
    assert (done.code, "openvino 20" in done.stdout) == (0, True), done.stderr
    done = agent("bench", bundle, *options)
    assert (done.code, "openvino 20" in done.stdout) == (0, True), done.stderr
    done = agent("train", bundle, "--data", data, "--out", "u", "--runtime", "tvm")
    assert (done.code, "'onnxruntime', 'openvino'" in done.stderr) == (2, True)
