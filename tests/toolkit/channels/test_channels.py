"""Models whose channels cannot be tracked are refused; channels form groups."""

import re
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

from edgetailor import split
from refusals import refused
from toolkit.channels.channel_choice import channel_window
from toolkit.channels.channel_units import Axis, Units


class Lambda(nn.Module):
    """A function between two linear layers of 12 features."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(3, 12)
        self.last = nn.Linear(12, 2)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.LSTM(3, 8, batch_first=True, proj_size=4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.memory(x)[0][:, -1])


class Squeezed(nn.Module):
    """Drops all axes of size 1."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1)
        self.last = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.conv(x).mean((2, 3), keepdim=True).squeeze())


REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "squeezed": (Squeezed, (2, 3, 3), "one channel would be left"),
    "every other": (lambda: Lambda(lambda x: x[:, ::2].repeat(1, 2)), (3,), "selects some"),
    "reversed": (lambda: Lambda(lambda x: x.flip(1)), (3,), r"aten\.flip.* changes their order"),
    "sorted": (lambda: Lambda(lambda x: x.sort(1).values), (3,), r"aten\.sort.* no rule"),
    "together": (lambda: Lambda(lambda x: x.softmax(1)), (3,), "softmax.*combines all of them"),
    "sum": (lambda: Lambda(lambda x: x + x.sum(1, keepdim=True) / 12), (3,), "sum.* sums over"),
    "projections": (Projected, (5, 3), r"aten\.lstm\.input in 'memory': no rule"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_tracked_is_refused(name: str) -> None:
    build, shape, message = REFUSED[name]
    with refused("spec.untracked-channels", spec="width:0.5") as caught:
        split(build(), "width:0.5", shape)
    operator, module, reason = (caught.value.values[n] for n in ("operator", "module", "reason"))
    where = f" in {module!r}" if module else ""
    assert operator.startswith("aten.")
    assert re.search(message, f"{operator}{where}: {reason}")
    assert f"{operator}{where}: {reason}" in str(caught.value)
    line = re.search(r"\(\S+\.py, line \d+: .+\)\. Use cp", str(caught.value))
    assert line


def test_a_layer_whose_channels_are_all_needed_keeps_them_and_others_get_narrower() -> None:
    model = nn.Sequential(
        nn.Linear(3, 12), nn.Softmax(1), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 2)
    )
    submodel = split(model, "width:0.5", (3,))
    shapes = {entry.name: entry.shape for entry in submodel.program.tensors if entry.stored}
    assert [shapes[f"{n}.weight"] for n in (0, 2, 4)] == [(12, 3), (4, 12), (2, 4)]
    reasons = {one.layer: one.reason for one in submodel.layer_decisions}
    assert reasons == {"0": "it combines all of them", "2": "", "4": ""}


def test_a_number_that_the_model_makes_itself_has_no_channels() -> None:
    submodel = split(Lambda(lambda x: x * torch.tensor(0.5)), "width:0.5", (3,))
    assert submodel.counts.params == 6 * 3 + 6 + 2 * 6 + 2


def counts(units: Units, ratio: str, *axes: Axis) -> list[int]:
    kept = channel_window(units, Fraction(ratio))
    return [kept.count(axis) for axis in axes]


def test_a_concatenation_that_another_layer_is_added_to_keeps_its_pieces() -> None:
    units = Units()
    one, other, both = map(units.new_axis, (4, 6, 10))
    for axis in (both, other, one):
        units.add_computed(axis)
    units.join(both[:4], one)
    units.join(both[4:], other)
    assert counts(units, "1/2", one, other, both) == [2, 3, 5]
    assert channel_window(units, Fraction(1, 2)).ranges(both) == ((0, 2), (4, 7))


@pytest.mark.parametrize(("first", "ranges"), [(2, ((2, 6),)), (5, ((0, 2), (5, 7)))])
def test_a_window_goes_on_at_the_beginning(first: int, ranges: tuple[tuple[int, int], ...]) -> None:
    units = Units()
    axis = units.new_axis(7)
    units.add_computed(axis)
    for turns in (0, 3):
        assert channel_window(units, Fraction(1, 2), first + 7 * turns).ranges(axis) == ranges


def test_what_is_the_same_as_something_fixed_stays() -> None:
    units = Units()
    axis = units.new_axis(9)
    units.add_computed(axis)
    units.pin(axis[3:5])
    assert channel_window(units, Fraction(1, 2)).ranges(axis) == ((0, 2), (3, 7))


def test_what_no_layer_computes_stays() -> None:
    units = Units()
    assert counts(units, "1/10", units.new_axis(5)) == [5]


@pytest.mark.parametrize(("ratio", "left"), [("0.07", 7), ("0.071", 8), ("0.0001", 1), ("1", 100)])
def test_the_leading_ones_are_kept_rounded_up(ratio: str, left: int) -> None:
    units = Units()
    axis = units.new_axis(100)
    units.add_computed(axis)
    assert channel_window(units, Fraction(ratio)).ranges(axis) == ((0, left),)
