"""Models that cannot be recorded or lowered: the error's code and the line of their source."""

import inspect
import math

import pytest
import torch
from torch import Tensor, nn

from edgetailor import split
from exporters.export import compile_graphs
from exporters.programs.source_lines import is_users, related, stem
from exporters.recording.capture import capture
from refusals import refused

SHAPE = (1, 6, 6)


class Model(nn.Module):
    """(N, 1, 6, 6) -> (N, 3); subclasses define `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(36, 3)

    def logits(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1))


class Decides(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = self.logits(x)
        while y.sum() > 0:  # here
            y = y * 2
        return y


class Reads(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = self.logits(x)
        return y * math.exp(y.max())  # here


class Selects(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = self.logits(x)
        return y + y[y > 0].median()  # here


class Drops(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = self.logits(x)
        return y[y[:, 0] > 0]  # here


class Fails(Model):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.layer.weight  # here


class Draws(Model):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.logits(x))  # here


class Reshapes(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.view(32, 36))  # here


class Counts(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x * 2 if len(x) > 4 else x)


class Fixes(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.reshape(3, 36))


class Samples(Model):
    def forward(self, x: Tensor) -> Tensor:
        grid = torch.zeros(1, 6, 6, 2).expand(x.shape[0], 6, 6, 2)
        x = self.layer.bias.mean() * x
        y = nn.functional.grid_sample(x, grid, "bicubic", align_corners=False)  # here
        return self.logits(y)


class Ends(Decides):
    """Notes when it runs on real numbers, for which the loop might never end."""

    ran, noise = False, 0.0

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:
            Ends.ran = True
            return self.logits(x)
        return super().forward(x + self.noise * torch.randn(x.shape) if self.noise else x)


INDEX = {"operator": "aten.index.Tensor"}
RECORDED = {"shape": [1, 6, 6], "dtype": "float32"}


def line_of(model: nn.Module) -> str:
    """The file and line with the comment `here`, as errors name it."""
    lines, first = inspect.getsourcelines(type(model))
    (offset,) = [number for number, line in enumerate(lines) if line.endswith("# here\n")]
    return f"test_source_lines.py, line {first + offset}: {lines[offset].strip()})"


@pytest.mark.parametrize(
    ("model", "code", "values", "parts"),
    [
        (Decides(), "model.data-dependent-code", {}, ["torch.where"]),
        (Reads(), "model.data-dependent-code", {}, ["leave out .item()"]),
        (Selects(), "model.data-dependent-size", INDEX, ["aten.index.Tensor", "torch.where"]),
        (Drops(), "model.data-dependent-size", INDEX, ["aten.index.Tensor", "torch.where"]),
        (Draws(), "model.random-numbers", {"layer": ""}, ["(aten.dropout", "self.training"]),
        (
            Reshapes(),
            "model.cannot-record",
            RECORDED,
            ["is invalid for input of size 36*batch", "Write -1 for the batch in reshape"],
        ),
        (Fails(), "model.cannot-record", RECORDED, ["shape (1, 6, 6)", "same reduction dim"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_errors_name_the_line_of_the_model(
    model: nn.Module,
    code: str,
    values: dict[str, object],
    parts: list[str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    with refused(code, **values) as error:
        capture(model, SHAPE)
    for part in (line_of(model), *parts):
        assert part in str(error.value)
    assert "\n" not in str(error.value)
    assert capfd.readouterr().err == ""  # torch prints nothing either


@pytest.mark.parametrize(("model", "limit"), [(Counts(), 4), (Fixes(), None)])
def test_models_for_some_batch_sizes_only_are_refused(model: nn.Module, limit: int | None) -> None:
    with refused("model.fixed-batch", limit=limit):
        capture(model, SHAPE)


class Branches(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x if x.shape[0] <= 25 else x * 2)


class Means(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x).mean(0, keepdim=True)


class Roots(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x.sqrt())


class Steps(Model):
    def forward(self, x: Tensor) -> Tensor:
        return torch.heaviside(self.logits(x), torch.zeros(()))


class Detached(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x).detach()


@pytest.mark.parametrize(
    ("model", "code", "values", "part"),
    [
        (Branches(), "model.fixed-batch", {"limit": 25}, "of more than 25 samples ("),
        (Means(), "model.wrong-output", {"shape": "(1, 3)"}, "output is (1, 3); "),
        (Roots(), "model.result-not-finite", {"what": "output"}, "output on a batch of random"),
        (Steps(), "model.backward-fails", {}, ": derivative for aten::heaviside is not impl"),
        (
            Detached(),
            "model.backward-fails",
            {},
            "PyTorch itself cannot train the model: element 0",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_errors_name_the_cause_in_the_model(
    model: nn.Module, code: str, values: dict[str, object], part: str
) -> None:
    with refused(code, part, **values):
        capture(model, SHAPE)


@pytest.mark.parametrize(
    ("recorded", "forward", "own"),
    [
        ("special_i1", "bessel_i1", True),
        ("fft_rfft", "_fft_r2c", True),
        ("linalg_det", "_linalg_svd", True),
        ("fft_rfft", "_linalg_svd", False),
        ("max_pool2d", "max_pool2d_with_indices_backward", True),
        ("matrix_exp", "linalg_matrix_exp", True),
        ("exp", "linalg_matrix_exp", False),
        ("mul", "median", False),
    ],
)
def test_operators_are_traced_back_to_their_calls(recorded: str, forward: str, own: bool) -> None:
    assert related(stem(f"aten::{recorded}"), stem(f"aten::{forward}")) is own


def test_an_operator_without_a_forward_form() -> None:
    model = Samples()
    with refused(
        "export.unsupported-operator",
        operator="aten::grid_sampler_2d_backward",
        signature="train",
    ) as error:
        compile_graphs(split(model, "full", SHAPE).program)
    assert "aten::grid_sampler_2d_backward (" in str(error.value)
    assert line_of(model) in str(error.value)
    assert str(error.value).endswith(
        "cannot be exported: no support for bicubic, reflecting and 3-D grid sampling (no "
        'gradient); use mode="bilinear" and padding_mode="zeros".'
    )


@pytest.mark.parametrize(
    ("file", "own"),
    [
        (__file__, True),
        (torch.nn.__file__, False),
        (inspect.getsourcefile(capture), False),
        (inspect.__file__, False),
        ("<eval_with_key>.3", False),
        ("/usr/lib/python3/site-packages/their_models/net.py", True),
    ],
)
def test_files_of_the_user(file: str, own: bool) -> None:
    assert is_users(file) is own


@pytest.mark.parametrize(
    ("noise", "code"), [(0.0, "model.data-dependent-code"), (1.0, "model.random-numbers")]
)
def test_code_that_decides_by_values_is_not_run_to_explain_it(noise: float, code: str) -> None:
    model = Ends()
    model.noise = noise
    with refused(code):
        capture(model, SHAPE)
    assert not Ends.ran
