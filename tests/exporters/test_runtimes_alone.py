"""The code of docs/reference/bundle.md, and other bundles run by nothing but their runtime."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

import oracles
from commands import ROOT
from edgetailor import TrainingConfig, export, split
from exporters.export import Format
from models_for_tests import CLASSES, INPUT_SHAPE, smooth_cnn
from oracles import Device, Plan
from parameters import some_long
from toolkit.submodels.global_model import from_model

pytest.importorskip("ai_edge_litert", reason="needs the extras [tflite] and [litert]")

from ai_edge_litert.interpreter import Interpreter  # type: ignore[import-not-found]

PLAN = Plan(batch_size=8, epochs=2, rate=0.1, momentum=0.9, weight_decay=0.0)
SNIPPETS = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs/reference/bundle.md").read_text(), re.DOTALL
)


def export_full(model: nn.Module, out: Path, format: Format) -> None:
    submodel = split(model, "full", INPUT_SHAPE, TrainingConfig(PLAN.batch_size))
    export(submodel, from_model(model), out, format=format, verify=False)


@pytest.mark.parametrize("format", some_long(["tflite", "onnx"], "tflite"))
def test_the_code_in_the_docs_trains_as_pytorch(
    format: Format, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(seed)
    model = smooth_cnn()
    export_full(model, tmp_path / "tflite", "tflite")
    monkeypatch.chdir(tmp_path)
    named: dict[str, Any] = {}
    first, second = SNIPPETS
    exec(first.replace("bundle/", "tflite/"), named)
    if format == "onnx":  # the second snippet goes on where the first one ended
        export_full(model, tmp_path / "onnx", "onnx")
        exec(second.replace("bundle/", "onnx/"), named)

    draw = np.random.default_rng(seed)
    x = draw.normal(0.3, 1.2, (21, *INPUT_SHAPE)).astype(np.float32)
    device = Device(x, draw.integers(CLASSES, size=21), seed=seed % 1000)
    old, expected = oracles.state_of(model), oracles.train_full(model, device, PLAN)
    for y, indices in device.visits(PLAN):
        named["step"](x[indices], y.numpy(), PLAN.rate, seed)
    oracles.assert_trained(named["state"], expected, old)


@pytest.mark.parametrize("format", ["tflite", "onnx"])
def test_a_single_sample_is_predicted_and_judged(format: Format, seed: int, tmp_path: Path) -> None:
    """Graphs that do not train take any batch from 1, although tracing uses another size."""
    torch.manual_seed(seed)
    model = smooth_cnn()
    bundle = tmp_path / "bundle"
    export_full(model, bundle, format)
    weights = load_file(bundle / "weights.safetensors")
    x = np.random.default_rng(seed).normal(0.3, 1.2, (1, *INPUT_SHAPE)).astype(np.float32)
    logits = model.double().eval()(torch.from_numpy(x).double())
    label = logits.argmax(1)
    loss = torch.nn.functional.cross_entropy(logits, label)
    for name, labels, expected in (
        ("predict", {}, [logits]),
        ("evaluate", {"y": label.numpy()}, [loss, torch.ones(())]),
    ):
        if format == "onnx":
            session = onnxruntime.InferenceSession(bundle / f"{name}.onnx")
            came = session.run(None, {"x": x, **weights, **labels})
        else:
            runner = Interpreter(str(bundle / "model.tflite")).get_signature_runner(name)
            results = runner(x=x, **weights, **labels)
            came = [
                results[key] for key in (("output",) if name == "predict" else ("loss", "correct"))
            ]
        for ours, theirs in zip(came, expected, strict=True):
            np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-4, atol=1e-5)
