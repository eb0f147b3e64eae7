"""Checks of a model's tensors and layers, and of traced signatures: codes and values of errors."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from exporters.programs.program import ProgramSignature, samples_port
from exporters.programs.tracing import EXAMPLE_BATCH, trace
from exporters.recording.capture import capture
from exporters.recording.model_checks import check_parameters
from refusals import refused


def with_parameter(name: str, value: Tensor) -> nn.Module:
    """A linear layer with a further parameter."""
    model = nn.Linear(3, 2)
    model.register_parameter(name, nn.Parameter(value, requires_grad=value.is_floating_point()))
    return model


def with_buffer(value: Tensor) -> nn.Module:
    model = nn.Linear(3, 2)
    model.register_buffer("scale", value)
    return model


def in_one_memory() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = nn.Parameter(model[0].weight.detach())
    return model


def without_weight() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 2))
    model[0].weight = None
    return model


class ExtraState(nn.Linear):
    """A layer whose state dict holds more than tensors."""

    def get_extra_state(self) -> int:
        return 3


CASES: dict[str, tuple[Callable[[], nn.Module], str, dict[str, object]]] = {
    "no weight": (without_weight, "model.missing-weight", {"layer": "0"}),
    "lazy": (lambda: nn.LazyLinear(2), "model.lazy-parameter", {"parameter": "weight"}),
    "one memory": (
        in_one_memory,
        "model.shared-memory",
        {"parameters": ["1.weight", "0.weight"]},
    ),
    "integers": (
        lambda: with_parameter("own", torch.ones(2, dtype=torch.int64)),
        "model.wrong-dtype",
        {"tensor": "own", "dtype": "torch.int64"},
    ),
    "double buffer": (
        lambda: with_buffer(torch.ones(2, dtype=torch.float64)),
        "model.wrong-dtype",
        {"tensor": "scale", "dtype": "torch.float64"},
    ),
    "empty": (
        lambda: with_parameter("own", torch.ones(0, 4)),
        "model.empty-parameter",
        {"parameter": "own", "shape": [0, 4]},
    ),
    "infinite": (
        lambda: with_buffer(torch.tensor([1.0, torch.inf])),
        "model.not-finite",
        {"tensor": "scale"},
    ),
    "plus": (
        lambda: with_parameter("own+", torch.ones(2)),
        "model.invalid-name",
        {"name": "own+"},
    ),
    "an attribute of graphs": (
        lambda: with_parameter("code", torch.ones(2)),
        "model.invalid-name",
        {"name": "code"},
    ),
    "quotation mark": (
        lambda: with_parameter('o"n', torch.ones(2)),
        "model.invalid-name",
        {"name": 'o"n'},
    ),
    "extra state": (lambda: ExtraState(3, 2), "model.extra-state", {"name": "_extra_state"}),
    "cumulative average": (
        lambda: nn.Sequential(nn.BatchNorm1d(3, momentum=None)),
        "model.cumulative-statistics",
        {"layer": "0"},
    ),
    "sparse": (
        lambda: with_buffer(torch.eye(2).to_sparse()),
        "model.sparse-tensor",
        {"tensor": "scale"},
    ),
    "no parameters": (nn.Tanh, "model.no-parameters", {}),
    "frozen": (lambda: nn.Linear(3, 2).requires_grad_(False), "model.all-frozen", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_tensors_and_layers_that_cannot_be_trained(case: str) -> None:
    build, code, values = CASES[case]
    with refused(code, **values):
        check_parameters(build())


def signature(function: Callable[[Tensor], Tensor]) -> ProgramSignature:
    """A signature x -> y of `function`."""

    def run(feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"y": function(feeds["x"])}

    return ProgramSignature("own", (samples_port((2,)),), (samples_port((2,), "y"),), run)


def test_a_signature_must_not_read_values() -> None:
    with refused("export.cannot-trace", signature="own"):
        trace(signature(lambda x: x * float(x.sum())))


def test_a_signature_must_not_branch_on_the_batch_size() -> None:
    with refused("export.fixed-batch", signature="own", batch=EXAMPLE_BATCH):
        trace(signature(lambda x: x * 2 if x.shape[0] == EXAMPLE_BATCH else x))


class Counting(nn.Module):
    """A layer that counts its steps, and may read the count."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.layer, self.reads = nn.Linear(3, 2), reads
        self.steps = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return self.layer(x) * torch.exp(-0.1 * self.steps) if self.reads else self.layer(x)


def test_a_count_of_steps_is_refused_only_if_the_model_reads_it() -> None:
    capture(Counting(reads=False), (3,))
    with refused("model.writes-own-tensor", tensor="steps"):
        capture(Counting(reads=True), (3,))


class OfDictionary(nn.Linear):
    """Takes its inputs as one dictionary."""

    def forward(self, input: Any) -> Tensor:
        return super().forward(input["left"])


def test_inputs_in_a_dictionary_need_their_names() -> None:
    with refused("model.inputs", name="left"):
        capture(OfDictionary(4, 3), (4,))
