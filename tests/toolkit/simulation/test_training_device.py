"""Where clients are trained. PyTorch's device "meta" shows what stays on the CPU, without a GPU."""

import pytest
import torch
from torch import Tensor, nn

from exporters.programs.program import ProgramSignature
from exporters.programs.tracing import DTYPES, flat_graph, trace_for_torch
from models_for_tests import INPUT_SHAPE, relu_cnn, smooth_cnn
from parameters import half_quick
from refusals import refused
from toolkit.simulation.torch_executor import check_device
from toolkit.splitting import split
from toolkit.submodels.hyperparameters import TrainingConfig

SPECS = ("slice:residual", "cp:2.0")


class Sequences(nn.Module):
    """A recurrent net over (steps, 3) that says one of five classes in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(3, 4, batch_first=True)
        self.classifier = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.recurrent(x)[0])


CASES = {
    **{spec: (smooth_cnn, INPUT_SHAPE, spec, TrainingConfig()) for spec in SPECS},
    "masked": (
        *(smooth_cnn, INPUT_SHAPE, "low-rank:0.25"),
        TrainingConfig(masked=True, optimizer="adam"),
    ),
    "ctc": (Sequences, (6, 3), "full", TrainingConfig(loss="ctc")),
}


def inputs_of(signature: ProgramSignature) -> list[Tensor]:
    return [
        torch.empty(
            [4 if size is None else size for size in port.shape],
            dtype=DTYPES[port.dtype],
            device="meta",
        )
        for port in signature.inputs
    ]


@pytest.mark.parametrize("case", half_quick(CASES))
def test_a_traced_graph_computes_on_its_device_alone(case: str) -> None:
    build, shape, spec, training = CASES[case]
    for signature in split(build(), spec, shape, training).program.signatures:
        results = trace_for_torch(signature, "meta")(*inputs_of(signature))
        assert {one.device.type for one in results} == {"meta"}, signature.name


def test_moving_the_weights_is_not_enough() -> None:
    """The classes of the loss would stay on the CPU, so the test above can fail."""
    (signature,) = (
        one
        for one in split(relu_cnn(), "full", INPUT_SHAPE).program.signatures
        if one.name == "train"
    )
    with pytest.raises(RuntimeError, match="device"):
        flat_graph(signature, {}).to("meta")(*inputs_of(signature))


def test_devices_that_cannot_be_used() -> None:
    check_device("cpu")
    for name in ("meta", "no-device", "cuda:99"):
        with refused("simulation.device", device=name):
            check_device(name)
