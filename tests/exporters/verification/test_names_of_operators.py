"""Tensors of a model may have the names that a traced graph gives to its operators."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from edgetailor import TrainingConfig, export, split
from toolkit.submodels.global_model import from_model

NAMES = ("mean", "mul", "sub", "add", "mm", "tanh")


class Standardized(nn.Module):
    """Its samples are standardized by buffers. Its batch norm computes two means of its own."""

    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            self.register_buffer(name, torch.full((4,), 0.5))
        self.layer, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for name in NAMES:
            x = (x - getattr(self, name)) * 1.1
        y: Tensor = self.last(self.norm(self.layer(x)).tanh())
        return y


@pytest.mark.parametrize("format", ["onnx", "tflite"])
def test_tensors_may_have_the_names_of_operators(format: Any, seed: int, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    model = Standardized()
    bundle = export(
        split(model, "full", (4,), TrainingConfig(batch_size=4)),
        from_model(model),
        tmp_path / "bundle",
        format=format,
    )
    assert bundle.verdict is not None
    assert bundle.verdict.passed
