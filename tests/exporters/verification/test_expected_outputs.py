"""What verification computes in float64: outputs one by one, and equal operators once."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from edgetailor import TrainingConfig, split
from exporters.export import compile_graphs, traced
from exporters.programs.program import Program, Tensors
from exporters.verification import expected_outputs
from exporters.verification.double_precision import reference
from exporters.verification.example_inputs import examples
from exporters.verification.expected_outputs import ExpectedOutputs
from exporters.verification.verify import verify
from foreign_models import Recurrent, VisionTransformer
from parameters import half_quick
from toolkit.submodels.global_model import from_model

PICTURES = nn.Sequential(
    *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5)),
    *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)),
)


class Coordinates(nn.Linear):
    """Features of high frequency, as radiance fields have: they show the rounding of numbers."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input * (1000 * torch.linspace(2, 6, 6)).sin())


def training(model: nn.Module, shape: tuple[int, ...]) -> tuple[Program, Tensors]:
    """The program of the training step of `model`, and its weights."""
    submodel = split(model, "full", shape, TrainingConfig(momentum=0.9))
    return submodel.program, submodel.cut(from_model(model))


@pytest.mark.parametrize(
    ("model", "shape"),
    half_quick([(PICTURES, (1, 8, 8)), (VisionTransformer(), (3, 8, 8)), (Recurrent(), (7, 6))]),
    ids=["pictures", "attention", "recurrent"],
)
def test_outputs_one_by_one_are_those_of_a_whole_step(
    model: nn.Module, shape: tuple[int, ...], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expected_outputs, "LARGE", 0)
    torch.manual_seed(seed)
    program, values = training(model, shape)
    train = next(s for s in program.signatures if s.trains)
    feeds = examples(train.inputs, program, values, torch.Generator().manual_seed(seed), 4)
    order = torch.randperm(len(train.outputs)).tolist()
    right = reference(train, feeds)
    outputs = dict(ExpectedOutputs(train, order).of(feeds))
    assert list(outputs) == order
    for number, value in outputs.items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(value, right[train.outputs[number].name], rtol=1e-9, atol=1e-12)


def test_equal_layers_are_compared_once(seed: int) -> None:
    counts = []
    for layers in (4, 7):
        torch.manual_seed(seed)
        hidden = [part for _ in range(layers) for part in (nn.Linear(8, 8), nn.Tanh())]
        program, values = training(nn.Sequential(*hidden, nn.Linear(8, 3)), (8,))
        graphs, compared = compile_graphs(program), set[bytes]()
        trace = partial(traced, "onnx")
        assert verify(program, graphs, values, trace, seed, compared).passed
        counts.append(len(compared))
        assert verify(program, graphs, values, trace, seed, compared).passed
        assert len(compared) == counts[-1]
    assert counts[0] == counts[1]


def test_formulas_of_high_frequencies_are_right(seed: int) -> None:
    torch.manual_seed(seed)
    program, values = training(Coordinates(6, 3), (6,))
    assert verify(program, compile_graphs(program), values, partial(traced, "onnx"), seed).passed
