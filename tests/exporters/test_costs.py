"""Multiply-accumulates of signatures, counted by hand."""

from torch import nn

from exporters.costs import macs
from exporters.program import Program
from toolkit import split

BATCH = 5
CONVOLUTION = 4 * 4 * 3 * (2 * 3 * 3)
"""Of one sample: 4 x 4 outputs of 3 channels, each of 2 x 3 x 3 inputs."""
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
    """But the samples need no gradient, so that the first layer has one product less."""
    forward = BATCH * (CONVOLUTION + CLASSIFIER)
    assert counted(program()) == {
        "train": BATCH * (2 * CONVOLUTION + 3 * CLASSIFIER),
        "predict": forward,
        "evaluate": forward,
    }


def test_frozen_layers_have_no_gradients() -> None:
    expected = BATCH * (CONVOLUTION + 3 * CLASSIFIER)
    # Batch norm still passes the gradient on to its own parameters, but not further.
    assert counted(program(frozen=True))["train"] == expected
