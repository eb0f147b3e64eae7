"""The code of docs/bundle.md, which trains a bundle with nothing but its runtime."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import oracles
from commands import ROOT
from exporters import export
from exporters.export import Format
from models_for_tests import CLASSES, INPUT_SHAPE, smooth_cnn
from oracles import Device, Plan
from toolkit import TrainingConfig, split
from toolkit.weights import from_model

pytest.importorskip("ai_edge_litert", reason="needs the extras [tflite] and [litert]")

PLAN = Plan(batch_size=8, epochs=2, rate=0.1, momentum=0.9, weight_decay=0.0)
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/bundle.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("format", ["tflite", "onnx"])
def test_the_code_in_the_docs_trains_as_pytorch(
    format: Format, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(seed)
    model = smooth_cnn()
    source = from_model(model)
    submodel = split(model, "full", INPUT_SHAPE, TrainingConfig(PLAN.batch_size))
    values = submodel.cut(source)
    for runtime in {format, "tflite"}:  # the second snippet goes on where the first one ended
        export(
            submodel.program, values, tmp_path / runtime, base=source.fingerprint(),
            format=runtime, check=False,
        )  # fmt: skip
    monkeypatch.chdir(tmp_path)
    named: dict[str, Any] = {}
    first, second = SNIPPETS
    exec(first.replace("bundle/", "tflite/"), named)
    if format == "onnx":
        exec(second.replace("bundle/", "onnx/"), named)

    draw = np.random.default_rng(seed)
    x = draw.normal(0.3, 1.2, (21, *INPUT_SHAPE)).astype(np.float32)
    device = Device(x, draw.integers(CLASSES, size=21), seed=seed % 1000)
    old, expected = oracles.state_of(model), oracles.train_full(model, device, PLAN)
    for y, indices in device.visits(PLAN):
        named["step"](x[indices], y.numpy(), PLAN.rate, seed)
    for name, value in expected.items():
        difference = float((torch.from_numpy(named["state"][name]).double() - value).norm())
        change = float((value - old[name]).norm())
        assert difference <= 1e-3 * change + 5e-7 * float(value.norm()), name
