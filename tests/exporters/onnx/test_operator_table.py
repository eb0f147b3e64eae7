"""torch.onnx's table of operators is built once; our own translations compute what torch does."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.onnx._internal.exporter._registration import ONNXRegistry

from edgetailor import Predictor, TrainingConfig, export, split
from exporters.onnx.operator_table import operators
from toolkit.submodels.global_model import from_model


class Angle(nn.Module):
    """The angle of two numbers. The parameter is only there because a model needs one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.atan2(x[:, :1] * self.scale, x[:, 1:])


@pytest.mark.parametrize("format", ["onnx", "tflite"])
def test_angles_of_zeros_have_the_sign_of_the_zero(format: str, seed: int, tmp_path: Path) -> None:
    """As those of real spectra: the imaginary part of their first frequency is +0 or -0."""
    draw = np.random.default_rng(seed)
    numbers = np.array([*draw.normal(size=4), 1e-30, -1e-30, 0.0, -0.0], dtype=np.float32)
    pairs = np.stack(np.meshgrid(numbers, numbers[:-1]), -1).reshape(-1, 2)
    model = Angle()
    submodel = split(model, "full", (2,), TrainingConfig(loss="mse"))
    export(submodel, from_model(model), tmp_path / "b", format=format, verify=False)
    came = Predictor(tmp_path / "b").predict(pairs)
    expected = torch.atan2(*torch.from_numpy(pairs).T)[:, None].numpy()
    np.testing.assert_allclose(came, expected, rtol=1e-6, atol=1e-6)


def test_exports_get_tables_of_their_own() -> None:
    fresh = ONNXRegistry.from_torchlib(opset_version=18)
    operators()
    first, second = (ONNXRegistry.from_torchlib(opset_version=18) for _ in range(2))
    assert first.functions.keys() == fresh.functions.keys()
    name, (form, *_) = next(iter(first.functions.items()))
    assert second.functions[name][0] is form  # not built again
    first.functions[name].clear()
    assert second.functions[name][0] is form
