"""Cards and the table of `deploy` for a model of several outputs, whose loss has metrics."""

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

import own_losses
from edgetailor import Predictor, TrainingConfig, deploy, evaluate
from toolkit.cli.printed.deploy_table import show_deployed
from toolkit.deployment.deploy_targets import Outcome
from toolkit.deployment.predicting_submodel import predicting_submodel
from toolkit.deployment.targets import Target


def test_outputs_and_metrics_are_named(
    tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    draw, loss = np.random.default_rng(seed), "own_losses:detection"
    x = draw.standard_normal((20, 6), dtype=np.float32)
    y = {"box": draw.standard_normal((20, 4), np.float32), "kind": draw.integers(0, 3, 20)}
    packed_labels = np.column_stack((y["box"], y["kind"])).astype(np.float32)
    model = own_losses.Boxes()
    deployed = deploy(
        model, "full", (6,), tmp_path / "out", training=TrainingConfig(loss=loss), data=(x, y)
    )
    card = deployed.card
    known = evaluate(model, x, packed_labels, loss=loss)
    assert card.quality is not None
    assert card.quality.metrics == pytest.approx(known.metrics, rel=1e-4)
    written = (tmp_path / "out" / "CARD.md").read_text()
    assert "| output `kind` | columns 0 to 2, (n, 3) float32 |" in written
    assert "| output `box` | columns 3 to 6, (n, 4) float32 |" in written
    session = ort.InferenceSession(tmp_path / "out" / card.graphs[0].file)
    (packed,) = session.run(None, {card.graphs[0].input: x})
    outputs = Predictor(tmp_path / "out").predict_outputs(x)
    np.testing.assert_allclose(packed[:, 3:7], outputs["box"], rtol=1e-5, atol=1e-6)
    figures = [f"{name} {value:.4g}" for name, value in (card.quality.metrics or {}).items()]
    assert f"loss {card.quality.loss:.4f}, {', '.join(figures)} on 20 held-out" in written
    target = Target(tmp_path / "out", "full", predicting_submodel("full"))
    show_deployed([Outcome(target, deployed)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        *("bundle", "submodel", "graph", "loss", "distance", "right", "memory"),
    ]
    assert "outputs: kind (batch, 3), box (batch, 4)" in lines
    assert any(line.startswith("the whole model in PyTorch, float32: loss ") for line in lines)
