"""A trial of a runtime, in a process of its own."""

import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from bundles import BATCH, SAMPLE_SHAPE, tiny_model
from device_agent.formats.bundle import Bundle
from device_agent.training.trials import runtime_trial
from device_agent.training.trials.runtime_trial import LOSSES, Request, in_child
from runtime_trials import OTHER, OWN

pytest.importorskip("openvino", reason="needs the extra [openvino]")


def test_a_trial_that_diverges_is_a_refusal(full: Bundle, tmp_path: Path) -> None:
    steep = tmp_path / "steep"
    shutil.copytree(full.folder, steep)
    text = (steep / "manifest.json").read_text()
    steeper = re.sub(r'"rate": [0-9.]+', '"rate": 1e30', text)
    assert steeper != text
    (steep / "manifest.json").write_text(steeper)
    found = in_child(Request(folder=str(steep), runtime=OWN, threads=1))
    assert "not finite" in (found.refused or "")


def test_a_trial_has_the_losses_of_the_runtime(full: Bundle) -> None:
    """Of the model's own, in float64, after each step."""
    draw = np.random.default_rng(0)
    x = torch.from_numpy(draw.standard_normal((BATCH, *SAMPLE_SHAPE), dtype=np.float32)).double()
    y = torch.from_numpy(draw.integers(8, size=BATCH))
    model, _ = tiny_model()
    model.double().train()
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    for _ in range(LOSSES):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for runtime in (OWN, OTHER):
        found = in_child(Request(folder=str(full.folder), runtime=runtime, threads=1))
        assert found.refused is None
        assert found.losses == pytest.approx(expected, rel=1e-4)
        assert min(found.train_s, found.start_s) > 0
        assert found.record_s == 0


def test_a_trial_that_fails_is_a_refusal(
    full: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(full.folder, tmp_path / "broken")
    (tmp_path / "broken" / "train.onnx").write_bytes(b"")
    broken = Request(folder=str(tmp_path / "broken"), runtime=OWN, threads=1)
    assert "train.onnx" in (in_child(broken).refused or "")
    monkeypatch.setattr(runtime_trial, "LONGEST_S", 0.01)
    assert "not finished" in (in_child(broken).refused or "")
    monkeypatch.setattr(runtime_trial, "LONGEST_S", 60.0)
    crash = tmp_path / "crash"
    crash.write_text("#!/bin/sh\nkill -KILL $$\n")
    crash.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(crash))
    assert "memory ran out" in (in_child(broken).refused or "")


def test_memory_is_limited_in_a_trial(full: Bundle) -> None:
    """A limit far below what Python takes leaves nothing for OpenVINO."""
    found = in_child(
        Request(folder=str(full.folder), runtime=OTHER, threads=1, max_memory=20_000_000)
    )
    assert found.refused is not None
