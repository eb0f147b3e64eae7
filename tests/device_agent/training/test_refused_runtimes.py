"""Runtimes that a bundle's training must not use: they cannot, or they compute other numbers."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor, nn

from bundles import BATCH, EPOCHS, SAMPLE_SHAPE
from device_agent.formats.bundle import Bundle, open_bundle
from device_agent.formats.update import TENSORS
from device_agent.runtime import openvino_runtime
from device_agent.runtime.runtime_choice import alternatives
from device_agent.training.training_options import TrainingOptions
from device_agent.training.trials.fastest_runtime import check_agrees
from device_agent.training.trials.runtime_trial import Request, Trial
from edgetailor import TrainingConfig, split
from exporters.export import export
from models_for_tests import Reader
from profiles.errors import BundleError
from refusals import refused
from runtime_trials import IDLE, OTHER, OWN, Clocked, choose, never
from toolkit.submodels.global_model import from_model
from trainings import train_bundle

pytest.importorskip("openvino", reason="needs the extra [openvino]")


def export_model(model: nn.Module, out: Path) -> Bundle:
    config = TrainingConfig(batch_size=BATCH)
    submodel, source = split(model, "full", SAMPLE_SHAPE, config), from_model(model)
    export(submodel.program, submodel.cut(source), out, base=source.fingerprint(), check=False)
    return open_bundle(out)


def test_a_runtime_that_refuses_the_graph_is_passed_over(
    tmp_path: Path, file: Path, said: list[str]
) -> None:
    bundle = export_model(Reader(), tmp_path / "bundle")
    clocked = Clocked({OTHER: 1.0})
    assert choose(bundle, file, clocked) == OWN
    assert [request.runtime for request in clocked.tried] == [OTHER], "there is nothing to compare"
    assert any("passed over" in line and "Scan" in line for line in said)
    assert choose(bundle, file, never) == OWN


def test_dropout_is_passed_over_without_a_trial(
    tmp_path: Path, file: Path, said: list[str]
) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(36, 3))
    bundle = export_model(model, tmp_path / "bundle")
    assert choose(bundle, file, never) == OWN
    assert any("passed over" in line and "dropout" in line for line in said)
    assert not file.exists()


def test_kept_kernels_are_passed_over(
    full: Bundle, file: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openvino_runtime, "keeps_kernels", lambda: True)
    assert choose(full, file, Clocked({OTHER: 1.0})) == OWN
    assert any("passed over" in line and "weights of the first step" in line for line in said)


def test_without_a_trial_of_its_own_runtime_a_bundle_keeps_it(
    full: Bundle, file: Path, said: list[str]
) -> None:
    def measure(request: Request) -> Trial:
        return Trial(refused="it crashed" if request.runtime == OWN else None, train_s=1.0)

    assert choose(full, file, measure) == OWN
    assert "openvino" in said[-2]
    assert "it crashed" in said[-2]


@pytest.mark.parametrize(
    ("theirs", "agree"),
    [
        ((2.301, 1.901, 1.501), True),
        ((2.31, 1.9, 1.5), False),
        ((2.3, 1.93, 1.5), False),
        ((2.3, 1.92, 1.51), True),
        ((2.3, float("nan"), 1.5), False),
    ],
    ids=["rounding", "forward", "gradient", "kink", "not-a-number"],
)
def test_losses_have_to_agree(
    theirs: tuple[float, ...], agree: bool, full: Bundle, file: Path, said: list[str]
) -> None:
    ours = (2.3, 1.9, 1.5)

    def measure(request: Request) -> Trial:
        own = request.runtime == OWN
        return Trial(train_s=2.0 if own else 1.0, losses=ours if own else theirs)

    assert choose(full, file, measure) == (OTHER if agree else OWN)
    assert any("the loss is" in line for line in said) != agree


@pytest.mark.parametrize(
    "theirs",
    [
        Trial(train_s=1.0, losses=(2.3,), changes={"w": [1.0] * 4}),
        Trial(train_s=1.0, losses=(2.3, 1.9)),
        Trial(train_s=1.0, losses=(2.3, 1.9), changes={"v": [1.0] * 4}),
        Trial(train_s=1.0, losses=(2.3, 1.9), changes={"w": [1.0] * 3}),
    ],
    ids=["losses", "no-changes", "other-tensor", "length"],
)
def test_a_damaged_trial_is_passed_over(
    theirs: Trial, full: Bundle, file: Path, said: list[str]
) -> None:
    ours = Trial(train_s=2.0, losses=(2.3, 1.9), changes={"w": [1.0] * 4})
    assert choose(full, file, lambda request: ours if request.runtime == OWN else theirs) == OWN
    assert any("its first steps are not those of" in line for line in said)


def test_only_onnx_bundles_have_a_choice(
    full: Bundle, file: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert alternatives("litert") == ()
    monkeypatch.setitem(sys.modules, "openvino", None)
    assert choose(full, file, never) == OWN
    assert [line.split()[:2] for line in said] == [["Runtime:", "onnxruntime"]]


def test_a_runtime_given_by_name_has_to_agree(full: Bundle, tmp_path: Path) -> None:
    options = TrainingOptions(threads=1)

    def check(name: str, theirs: Trial) -> None:
        ours = Trial(losses=(1.0, 0.8))
        check_agrees(
            *(full, OTHER, options, IDLE, tmp_path / name),
            measure=lambda request: ours if request.runtime == OWN else theirs,
        )

    check("equal", Trial(losses=(1.0, 0.801)))
    check("without memory", Trial(refused="memory ran out"))
    with refused("bundle.other-results", runtime=OTHER):
        check("other", Trial(losses=(1.0, 0.9)))


@pytest.mark.parametrize(
    ("nudged", "agree"),
    [
        (Trial(losses=(1.0,), changes={"w": [-1.0, 1.0, 1.0, -1.0], "v": [1.0] * 4}), True),
        (Trial(losses=(1.0,), changes={"w": [1.001] * 4, "v": [-1.0] * 4}), False),
        (Trial(refused="memory ran out"), False),
    ],
    ids=["rounding", "steady", "unknown"],
)
def test_changes_that_roundings_decide_are_not_compared(
    nudged: Trial, agree: bool, full: Bundle, file: Path, said: list[str]
) -> None:
    """Adam divides a gradient by its own size, also one that is only rounding."""
    made = {
        (OWN, False): Trial(train_s=2.0, losses=(1.0,), changes={"w": [1.0] * 4, "v": [1.0] * 4}),
        (OWN, True): nudged,
        (OTHER, False): Trial(losses=(1.0,), changes={"w": [-1.0] * 4, "v": [1.0] * 4}),
    }
    found = choose(full, file, lambda request: made[request.runtime, request.nudged])
    assert found == (OTHER if agree else OWN)
    assert any("changes 'w' otherwise, by 200%" in line for line in said) != agree


class Residual(nn.Module):
    """A residual block with layer norm before its layers, as in transformers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 256), nn.GELU(), nn.Linear(256, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inside(x)


def test_no_wrong_gradients_of_layer_norm(seed: int, tmp_path: Path) -> None:
    """OpenVINO 2026.4 computes them from the second residual block on."""
    torch.manual_seed(seed)
    blocks = (Residual(128) for _ in range(3))
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d((1, None)), nn.Flatten(), nn.Linear(128, 4))
    training = TrainingConfig(batch_size=BATCH, epochs=EPOCHS, learning_rate=0.2)
    submodel, source = split(model, "full", (64, 128), training), from_model(model)
    bundle = tmp_path / "bundle"
    export(submodel.program, submodel.cut(source), bundle, base=source.fingerprint(), check=False)
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((3 * BATCH, 64, 128), dtype=np.float32)
    y = draw.integers(4, size=3 * BATCH)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    updates = []
    for runtime in ("onnxruntime", "openvino"):
        out = tmp_path / runtime
        options = {"runtime": runtime, "threads": 1, "trials": tmp_path / "trials.json"}
        try:
            train_bundle(bundle, str(tmp_path / "data.npz"), out, **options)
        except BundleError as error:
            found = (runtime, error.code)
        else:
            found = None
        if found is not None:
            assert found == ("openvino", "bundle.other-results")
            return
        updates.append(load_file(out / TENSORS))
    ours, theirs = updates
    for name, value in ours.items():
        assert np.abs(theirs[name] - value).max() <= 1e-3 * np.abs(value).max(), name
