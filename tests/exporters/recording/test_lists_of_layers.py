"""Models that reach their registered parameters through Python lists and dictionaries."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from exporters.recording.capture import capture
from one_step import check_one_step
from parameters import half_quick
from refusals import refused


class Stacks(nn.Module):
    """Layers in lists of lists, whose parameters a list of parameters registers, as N-BEATS."""

    def __init__(self) -> None:
        super().__init__()
        self.stacks = [[nn.Linear(6, 6), nn.Linear(6, 6)], [nn.Linear(6, 3)]]
        layers = [layer for stack in self.stacks for layer in stack]
        self.registered = nn.ParameterList([p for layer in layers for p in layer.parameters()])

    def forward(self, x: Tensor) -> Tensor:
        for stack in self.stacks:
            for layer in stack:
                x = torch.tanh(layer(x))
        return x


class Named(nn.Module):
    """Parameters that are registered and read from a dictionary, as liquid networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.own: dict[str, Tensor] = {}
        for name, shape in (("w", (3, 6)), ("b", (3,))):
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
            self.own[name] = self.get_parameter(name)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.own["w"].T + self.own["b"]


@pytest.mark.parametrize("build", half_quick([Stacks, Named]))
def test_parameters_in_containers_train(build: type[nn.Module], seed: int, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    check_one_step(build(), (6,), None, "onnx", tmp_path)


def test_rows_chosen_for_experts_are_refused_with_their_line() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(6, 2)
            self.experts = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])

        def forward(self, x: Tensor) -> Tensor:
            gates = self.gate(x).relu()
            rows = torch.nonzero(gates)[:, 0]
            parts = torch.split(x[rows], (gates > 0).sum(0).tolist(), 0)
            outputs = [expert(part) for expert, part in zip(self.experts, parts, strict=True)]
            return torch.zeros(x.shape[0], 3).index_add(0, rows, torch.cat(outputs, 0))

    with refused("model.data-dependent-size", "torch.nonzero(gates)"):
        capture(Experts(), (6,))
