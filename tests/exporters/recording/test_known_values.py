"""Python code that decides by the constants of a model: recorded, or refused with a remedy."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from exporters.recording.capture import capture
from parameters import half_quick
from refusals import refused

Compute = Callable[["Written", Tensor], Tensor]


class Written(nn.Module):
    """Layers with `compute` between them, and tensors that are not trained."""

    flag: Tensor
    shifts: Tensor

    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(6, 8), nn.Linear(8, 3), nn.BatchNorm1d(8)
        self.register_buffer("flag", torch.tensor(0, dtype=torch.uint8))
        self.register_buffer("shifts", torch.tensor([1, 3]))
        self.kept = torch.tensor([True, False, True, True, False, True, False, True])
        self.sizes, self.scale = torch.tensor([3, 5]), torch.tensor(0.5)
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.compute(self, self.first(x)))


def columns(model: Written, h: Tensor) -> Tensor:
    parts = []
    for column, kept in enumerate(model.kept):
        if kept:
            parts.append(h[:, column : column + 1])
        else:
            parts.append(h[:, column : column + 1].sin())
    return torch.cat(parts, 1)


def flagged(model: Written, h: Tensor) -> Tensor:
    return h.sin() if not model.flag.item() else h


def shifted(model: Written, h: Tensor) -> Tensor:
    for shift in model.shifts.tolist():
        h = h + h.roll(shift, 1)
    for _ in range(model.shifts[1]):
        h = h * float(model.scale)
    return h


def grouped(model: Written, h: Tensor) -> Tensor:
    """As in DINO: inputs of one size go through the layers together."""
    parts, start = [h, h.sin(), h.cos()], 0
    counts = torch.unique_consecutive(torch.tensor([8, 8, 4]), return_counts=True)[1]
    for end in torch.cumsum(counts, 0):
        h = h + torch.stack(parts[start:end]).mean(0).tanh()
        start = end
    return h * len(model.kept.nonzero()) / 5


def parted(model: Written, h: Tensor) -> Tensor:
    first, second = h.split(model.sizes.tolist(), 1)
    return torch.cat([second, first], 1)


def checked(model: Written, h: Tensor) -> Tensor:
    assert (model.sizes > 0).all()
    assert model.sizes.sum() == 8
    return h[:, : int(model.kept.sum())].repeat(1, 2)[:, :8]


def solved(model: Written, h: Tensor) -> Tensor:
    """Steps of a solver: the code makes their times, writes the last one, and compares them."""
    end = torch.tensor([0, 1]).float().type_as(h)[-1]
    times = torch.arange(0, int(torch.ceil(end / 0.3 + 1).item())) * 0.3
    times[-1] = end
    assert times[0] == 0
    assert times[-1] == 1
    for before, after in zip(times[:-1], times[1:], strict=True):  # noqa: RUF007
        h = h + (after - before) * h.sin()
        if after >= 0.5 and after - before < 0.2:
            h = -h
    return h


def flattened(model: Written, h: Tensor) -> Tensor:
    both = torch.stack([h, h.sin()], 1)
    size = torch.prod(torch.tensor(both.shape[1:])).item()
    return both.view(-1, size)[:, ::2]


READ = [columns, flagged, shifted, parted, grouped, checked, solved, flattened]


@pytest.mark.parametrize("compute", half_quick(READ))
def test_constants_are_read(compute: Compute) -> None:
    model = Written(compute)
    captured = capture(model, (6,))
    x = torch.randn(4, 6)
    torch.testing.assert_close(captured.inference(x), model.eval()(x), rtol=0, atol=1e-5)


def after_a_write(model: Written, h: Tensor) -> Tensor:
    kept = model.kept.clone()
    kept[0] = False
    return h if kept[0] else h.sin()


def after_a_write_of_samples(model: Written, h: Tensor) -> Tensor:
    numbers = torch.zeros(3) + 1
    numbers[0] = h.mean()
    return h if numbers[0] > 0 else h.sin()


def after_a_write_through_a_view(model: Written, h: Tensor) -> Tensor:
    numbers = torch.arange(6).float()
    numbers.view(2, 3)[1] += 5
    return h.sin() if numbers[4] > 8 else h


def counted(model: Written, h: Tensor) -> Tensor:
    h = model.norm(h)
    return h if model.norm.num_batches_tracked > 5 else h.sin()


def by_samples(model: Written, h: Tensor) -> Tensor:
    return h if (h.sum(0) > model.scale)[0] else h.sin()


def test_counters_that_change_are_not_read() -> None:
    with refused("model.data-dependent-code", "return h if"):
        capture(Written(counted), (6,))


CHANGED = [after_a_write, after_a_write_of_samples, after_a_write_through_a_view, by_samples]


@pytest.mark.parametrize("compute", CHANGED)
def test_values_that_change_are_not_constants(compute: Compute, seed: int) -> None:
    torch.manual_seed(seed)
    model = Written(compute)
    captured = capture(model, (6,))
    for x in 4 * torch.randn(4, 4, 6):
        torch.testing.assert_close(captured.inference(x), model.eval()(x), rtol=0, atol=1e-5)


def test_a_shift_by_a_number_of_samples() -> None:
    def rolled(model: Written, h: Tensor) -> Tensor:
        return h.roll(int(h.detach().sum(0).argmax()), 1)

    def both(model: Written, h: Tensor) -> Tensor:
        return h + torch.roll(h, (int(h.detach().sum(0).argmin()), 2), dims=(1, 1))

    for compute in (rolled, both):  # `capture` compares the recording with the model
        capture(Written(compute), (6,))


class Scaled(nn.Module):
    """A scale that the first batch sets; a `strict` one must train before it predicts."""

    ready: Tensor

    def __init__(self, strict: bool) -> None:
        super().__init__()
        self.scale, self.strict = nn.Parameter(torch.ones(8)), strict
        self.register_buffer("ready", torch.tensor(0, dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        if self.ready.item() == 0:
            if self.strict and not self.training:
                raise ValueError("train it first")
            self.scale.data.copy_(1 / x.std(0))
            self.ready.fill_(1)
        return x * self.scale


@pytest.mark.parametrize("strict", [False, True])
def test_scales_that_the_first_batch_sets_must_be_set_before(strict: bool, seed: int) -> None:
    torch.manual_seed(seed)
    model, x = nn.Sequential(Scaled(strict), nn.Linear(8, 8), Scaled(strict)), torch.randn(5, 8)
    with refused("model.writes-own-tensor", "run the model once on real samples"):
        capture(model, (8,))
    model(x)
    torch.testing.assert_close(capture(model, (8,)).inference(x), model.eval()(x))
