"""Multiply-accumulates of signatures, compared with counts by hand."""

import pytest
import torch
from torch import Tensor, nn

from edgetailor import split
from exporters.programs.operation_counts import macs
from exporters.programs.program import Program
from parameters import some_long

BATCH = 5
CONVOLUTION = 4 * 4 * 3 * (2 * 3 * 3)
"""For one sample: 4 x 4 outputs of 3 channels, each from 2 x 3 x 3 inputs."""
CLASSIFIER = 48 * 7


def program(frozen: bool = False) -> Program:
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 7)
    )
    model[0].requires_grad_(not frozen)
    return split(model, "full", (2, 6, 6)).program


def counted(of: Program) -> dict[str, int]:
    return {signature.name: macs(signature, BATCH) for signature in of.signatures}


def test_a_step_is_a_forward_pass_and_both_gradients() -> None:
    """The samples need no gradient, so that the first layer has one product fewer."""
    forward = BATCH * (CONVOLUTION + CLASSIFIER)
    assert counted(program()) == {
        "train": BATCH * (2 * CONVOLUTION + 3 * CLASSIFIER),
        "predict": forward,
        "evaluate": forward,
    }


def test_frozen_layers_have_no_gradients() -> None:
    expected = BATCH * (CONVOLUTION + 3 * CLASSIFIER)
    # The gradient still reaches the parameters of the batch norm, but no earlier layer.
    assert counted(program(frozen=True))["train"] == expected


class Recurrent(nn.Module):
    """(N, 9, 2) -> (N, 7): two layers of 3 units, then a classifier of the last state."""

    def __init__(self, layer: type[nn.RNNBase], bidirectional: bool) -> None:
        super().__init__()
        self.layer = layer(2, 3, num_layers=2, batch_first=True, bidirectional=bidirectional)
        self.classifier = nn.Linear(3, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.layer(x)[0][:, -1, :3])


@pytest.mark.parametrize("bidirectional", some_long([False, True], False))
@pytest.mark.parametrize(
    ("layer", "gates"),
    some_long([(nn.RNN, 1), (nn.GRU, 3), (nn.LSTM, 4)], (nn.RNN, 1), (nn.GRU, 3)),
)
def test_recurrent_layers_count_each_time_step(
    layer: type[nn.RNNBase], gates: int, bidirectional: bool
) -> None:
    """The backward pass of a loop always computes the gradient of the samples."""
    directions = 2 if bidirectional else 1
    units = gates * 3 * directions
    forward = BATCH * (9 * (units * (2 + 3) + units * (3 * directions + 3)) + 3 * 7)
    submodel = split(Recurrent(layer, bidirectional), "full", (9, 2))
    assert counted(submodel.program) == {
        "train": 3 * forward,
        "predict": forward,
        "evaluate": forward,
    }


@pytest.mark.parametrize("groups", [2, 6])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_grouped_convolution_has_grouped_gradients(groups: int, transposed: bool) -> None:
    """6 to 12 channels: each weight meets each place of the smaller image once, three times."""
    layer = nn.ConvTranspose2d if transposed else nn.Conv2d
    model = nn.Sequential(
        nn.Conv2d(2, 6, 1), layer(6, 12, 3, stride=2, groups=groups), nn.Flatten(), nn.LazyLinear(7)
    )
    model(torch.zeros(1, 2, 7, 7))
    grouped = (7 * 7 if transposed else 3 * 3) * (6 * 12 // groups * 3 * 3)
    classifier = model[3].in_features * 7
    step = split(model, "full", (2, 7, 7)).program
    first = 7 * 7 * 2 * 6
    assert counted(step)["predict"] == BATCH * (first + grouped + classifier)
    assert counted(step)["train"] == BATCH * (2 * first + 3 * (grouped + classifier))
