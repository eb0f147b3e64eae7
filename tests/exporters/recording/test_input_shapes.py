"""A wrong input shape is explained by the layer that cannot take it."""

import pytest
import torch
from torch import Tensor, nn

from exporters.recording.capture import capture
from exporters.recording.inputs.input_shapes import wrong_input_shape
from refusals import refused


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Linear(4 * 8 * 8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x)).flatten(1))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.lstm = nn.LSTM(6, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(x))[0][:, -1])


@pytest.mark.parametrize(
    ("model", "shape", "layer", "takes", "came"),
    [
        (Image(), (1, 8, 8), "first", "(batch, 3, height, width)", "(batch, 1, 8, 8)"),
        (Image(), (8, 8, 3), "first", "(batch, 3, height, width)", "(batch, 8, 8, 3)"),
        (Image(), (8, 8), "first", "(batch, 3, height, width)", "(batch, 8, 8)"),
        (Image(), (192,), "first", "(batch, 3, height, width)", "(batch, 192)"),
        (Image(), (3, 9, 8), "head", "(batch, ..., 256)", "(batch, 288)"),
        (Words(), (7, 2), "lstm", "(batch, steps, 6)", "(batch, 7, 2, 6)"),
        (nn.Linear(4, 2), (5,), "", "(batch, ..., 4)", "(batch, 5)"),
        (
            nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)),
            *((3,), "0", "(batch, 4, ...)", "(batch, 3)"),
        ),
    ],
)
def test_the_layer_that_does_not_fit_is_named(
    model: nn.Module, shape: tuple[int, ...], layer: str, takes: str, came: str
) -> None:
    values = {"shape": list(shape), "layer": layer, "takes": takes, "came": came}
    with refused("model.wrong-input-shape", **values) as caught:
        capture(model, shape)
    assert all(str(value) in str(caught.value) for value in (shape, layer, takes, came))
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_model_that_fails_otherwise_is_not_explained_by_its_shape() -> None:
    assert wrong_input_shape(Image(), (3, 8, 8)) is None
    assert wrong_input_shape(nn.Sequential(nn.Linear(4, 2), nn.Unflatten(1, (3, 3))), (4,)) is None
