"""Models that cannot be recorded or lowered: the sentence, and the line of their own source."""

import inspect
import re

import pytest
import torch
from torch import Tensor, nn

from edgetailor import compile_graphs, split
from exporters.programs.capture import capture
from exporters.programs.source_lines import is_users, related, stem
from profiles.errors import ExportError, ModelError

SHAPE = (1, 6, 6)


class Model(nn.Module):
    """(N, 1, 6, 6) -> (N, 3), when `forward` allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(36, 3)

    def logits(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1))


class Decides(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = self.logits(x)
        if y.sum() > 0:  # here
            y = y * 2
        return y


class Reads(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = self.logits(x)
        return y * float(y.max())  # here


class Selects(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = self.logits(x)
        return y + y[y > 0].mean()  # here


class Drops(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = self.logits(x)
        return y[y[:, 0] > 0]  # here


class Fails(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(2)[:, 0, :7])  # here


class Draws(Model):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gumbel_softmax(self.logits(x))  # here


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
        y = nn.functional.grid_sample(self.layer.bias.mean() * x, grid, align_corners=False)  # here
        return self.logits(y)


def place(model: nn.Module) -> str:
    """File and line that the comment `here` marks."""
    lines, first = inspect.getsourcelines(type(model))
    (offset,) = [number for number, line in enumerate(lines) if line.endswith("# here\n")]
    return f"test_source_lines.py, line {first + offset}: {lines[offset].strip()})"


@pytest.mark.parametrize(
    ("model", "rule", "remedy"),
    [
        (Decides(), "decides by the numbers that flow through it", "Choose with torch.where"),
        (Reads(), "decides by the numbers that flow through it", "Choose with torch.where"),
        (Selects(), "The size of aten.index.Tensor", "Mask with torch.where instead"),
        (Drops(), "The size of aten.index.Tensor", "Mask with torch.where instead"),
        (Draws(), "draws random numbers when it trains (aten.exponential", "leave it out"),
        (Reshapes(), "is invalid for input of size 36*batch", "Write -1 for the batch in reshape"),
        (Fails(), "cannot be recorded for samples of shape (1, 6, 6)", "same reduction dim"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_cannot_be_recorded(
    model: nn.Module, rule: str, remedy: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ModelError) as error:
        capture(model, SHAPE)
    for part in (rule, place(model), remedy):
        assert part in str(error.value)
    assert "\n" not in str(error.value)
    assert capfd.readouterr().err == ""  # nor does torch talk


@pytest.mark.parametrize("model", [Counts(), Fixes()], ids=["asks", "fixes"])
def test_batches_of_some_sizes_only(model: nn.Module) -> None:
    with pytest.raises(ModelError) as error:
        capture(model, SHAPE)
    assert str(error.value) == (
        "The model cannot be recorded for batches of any size, only for some: its code fixes or "
        "asks how many samples there are. Write -1 for the batch in reshape and view, and decide "
        "nothing by len(x) or x.shape[0]."
    )


class Distances(Model):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(self.logits(x), self.layer.weight[:, :3])


class Maps(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(2))


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
    ("model", "message"),
    [
        (Distances(), "computes otherwise for batches of more than 25 samples, as torch.cdist"),
        (Maps(), "output is (batch, 1, 3); it must be one tensor of shape (batch, classes)"),
        (Roots(), "output on a batch of random samples holds a number that is not finite"),
        (Steps(), "cannot train the model: derivative for aten::heaviside is not implemented"),
        (Detached(), "PyTorch itself cannot train the model: element 0 of"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_the_reason_is_the_users_and_not_torchs(model: nn.Module, message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message).replace(r"\.\*", ".*")):
        capture(model, SHAPE)


@pytest.mark.parametrize(
    ("recorded", "forward", "own"),
    [
        ("special_i1", "bessel_i1", True),
        ("fft_rfft", "_fft_r2c", True),
        ("linalg_det", "_linalg_svd", True),
        ("fft_rfft", "_linalg_svd", False),
        ("max_pool2d", "max_pool2d_with_indices_backward", True),
        ("mul", "median", False),
    ],
)
def test_whose_gradient_or_part_an_operator_is(recorded: str, forward: str, own: bool) -> None:
    assert related(stem(f"aten::{recorded}"), stem(f"aten::{forward}")) is own


def test_an_operator_without_a_forward_form() -> None:
    model = Samples()
    with pytest.raises(ExportError) as error:
        compile_graphs(split(model, "full", SHAPE).program)
    assert "aten::grid_sampler_2d_backward (" in str(error.value)
    assert place(model) in str(error.value)
    assert str(error.value).endswith(
        "has no forward form: grid sampling (no gradient) is not covered; nearest: nn.Upsample."
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
def test_whose_a_file_is(file: str, own: bool) -> None:
    assert is_users(file) is own
