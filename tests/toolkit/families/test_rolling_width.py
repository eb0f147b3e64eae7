"""`width` with a rolling window (FedRolex): its channels in every round, counted by hand."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn

from edgetailor import GlobalModel, TrainingConfig, split
from narrow_models import Concatenating, Gated, Packed, Plain, Recurrent, Separable, Shuffled
from parameters import half_quick, some_long
from toolkit.submodels.rolling_window import in_round

Hand = Mapping[tuple[str, int], Sequence[int]]
"""Indices of an axis of a tensor, by the tensor's name and the number of the axis."""


def window(size: int, count: int, first: int, *, each: int = 1, times: int = 1) -> list[int]:
    """`count` of `size` channels from `first` on, around the end, in ascending order.

    Every channel has `each` neighbouring indices, and all channels come `times` times.
    """
    channels = sorted((first + place) % size for place in range(count))
    return [
        (again * size + channel) * each + place
        for again in range(times)
        for channel in channels
        for place in range(each)
    ]


def after(start: int, indices: Sequence[int]) -> list[int]:
    return [start + index for index in indices]


@dataclass(frozen=True)
class Case:
    """A model, its narrow twin, and the axes on which channels are not simply one after another."""

    build: Callable[..., nn.Module]
    widths: tuple[int, ...]
    narrow: tuple[int, ...]
    shape: tuple[int, ...]
    ratio: str
    by_hand: Callable[[int], Hand] = field(default=lambda _: {})


def of_plain(r: int) -> Hand:
    return {("hidden.weight", 1): window(10, 4, r, each=8)}


def of_separable(r: int) -> Hand:
    double = window(6, 3, r, each=2)
    tensors = ("depth2.weight", "excite.weight", "excite.bias", *(f"bn.{n}" for n in NORM))
    return {(name, 0): double for name in tensors} | {
        ("squeeze.weight", 1): double,
        ("classifier.weight", 1): double,
    }


NORM = ("weight", "bias", "running_mean", "running_var")


def of_concatenating(r: int) -> Hand:
    pieces = [
        *window(7, 3, r),
        *after(7, window(5, 2, r)),
        *after(12, window(10, 4, r)),
        *(22, 23),
    ]
    tensors = ("beside.weight", "beside.bias", *(f"bn.{n}" for n in NORM))
    return {(name, 0): pieces for name in tensors} | {
        ("join.weight", 1): pieces,
        ("classifier.weight", 1): pieces,
    }


def of_recurrent(r: int) -> Hand:
    lstm, gru = window(6, 3, r, times=4), window(5, 2, r, times=3)
    both = window(6, 3, r, times=2)
    ends = ("l0", "l0_reverse", "l1", "l1_reverse")
    found: dict[tuple[str, int], Sequence[int]] = {
        (f"lstm.{leaf}_{end}", 0): lstm
        for leaf in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        for end in ends
    }
    found |= {(f"lstm.weight_ih_{end}", 1): both for end in ends[2:]}
    found |= {(f"gru.weight_{side}_l0", 0): gru for side in ("ih", "hh")}
    return found | {
        ("gru.weight_ih_l0", 1): both,
        ("classifier.weight", 1): [*both, *after(12, window(5, 2, r))],
    }


def of_gated(r: int) -> Hand:
    halves = window(5, 3, r, times=2)
    # Zeros, the right half, the left half, zeros: four groups.
    padded = [
        *window(4, 2, r),
        *after(4, window(5, 3, r, times=2)),
        *after(14, window(4, 2, r)),
    ]
    return {
        ("gated.weight", 0): halves,
        ("gated.bias", 0): halves,
        ("halves.weight", 0): halves,
        ("halves.bias", 0): halves,
        ("wide.weight", 0): padded,
        ("wide.weight", 1): halves,
        ("wide.bias", 0): padded,
        ("classifier.weight", 1): padded,
    }


def of_packed(r: int) -> Hand:
    heads = window(4, 2, r, each=3, times=3)
    return {
        ("qkv.weight", 0): heads,
        ("qkv.bias", 0): heads,
        ("proj.weight", 1): window(4, 2, r, each=3),
    }


def of_shuffled(r: int) -> Hand:
    taken = window(6, 3, r, times=2)
    # A shuffle puts channels 0 and 1 of both groups of 4 into the first half, which is counted for
    # itself, and channels 2 and 3 into the second.
    grouped = window(2, 1, r, times=4)
    tensors = ("grouped.weight", "grouped.bias", *(f"norm.{n}" for n in NORM))
    found: dict[tuple[str, int], Sequence[int]] = {(name, 0): grouped for name in tensors}
    shuffled = window(2, 1, r, each=2)
    return found | {
        ("first.weight", 0): taken,
        ("first.bias", 0): taken,
        ("right.weight", 1): shuffled,
        ("classifier.weight", 1): [*shuffled, *after(4, window(4, 2, r))],
    }


CASES = {
    "plain": Case(Plain, (7, 10, 12), (3, 4, 5), (3, 9, 9), "0.4", of_plain),
    "separable": Case(Separable, (8, 6, 5), (4, 3, 2), (1, 9, 9), "0.4", of_separable),
    "concatenating": Case(
        Concatenating, (7, 10, 5, 6), (3, 4, 2, 3), (2, 8, 8), "0.4", of_concatenating
    ),
    "recurrent": Case(Recurrent, (5, 6, 5), (2, 3, 2), (7, 3), "0.4", of_recurrent),
    "gated": Case(Gated, (5, 5, 4), (3, 3, 2), (2, 6, 6), "0.5", of_gated),
    "packed attention": Case(Packed, (6, 4, 10), (3, 2, 5), (3, 8, 8), "0.5", of_packed),
    "shuffled": Case(Shuffled, (6, 4), (3, 2), (2, 5), "0.5", of_shuffled),
}


@pytest.mark.parametrize(
    "name",
    half_quick(some_long(CASES, "separable", "recurrent", "gated", "shuffled", "concatenating")),
)
def test_the_device_gets_the_window_of_the_round(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    case = CASES[name]
    model, twin = case.build(*case.widths), case.build(*case.narrow)
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.copy_(torch.rand(value.shape) + 0.1)
    weights = GlobalModel({n: v.clone() for n, v in model.state_dict().items()})
    submodel = split(model, f"width:{case.ratio},window=rolling", case.shape, TrainingConfig())
    x = torch.randn(6, *case.shape)
    for round_ in (1, *np.random.default_rng(seed).integers(2, 100, 3).tolist()):
        hand = case.by_hand(round_ - 1)
        state = twin.state_dict()
        for tensor, value in state.items():
            whole = weights.tensors[tensor]
            rows = [
                hand.get((tensor, axis)) or window(size, count, round_ - 1)
                for axis, (size, count) in enumerate(zip(whole.shape, value.shape, strict=True))
            ]
            value.copy_(whole[np.ix_(*rows)] if rows else whole)
        shown = in_round(submodel, round_)
        received = shown.cut(weights)
        for entry in shown.program.tensors:
            if entry.stored:
                assert torch.equal(received[entry.name], state[entry.name]), (round_, entry.name)
                assert entry.shape == state[entry.name].shape
        (predict,) = (s for s in shown.program.signatures if s.name == "predict")
        with torch.no_grad():
            came = predict.function({**received, "x": x})["output"]
            torch.testing.assert_close(came, twin.eval()(x), rtol=1e-4, atol=1e-5)


def test_every_channel_is_trained_equally_often() -> None:
    model = nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 2))
    submodel = split(model, "width:0.35,window=rolling", (3,))
    times = np.zeros(10)
    for round_ in range(1, 11):
        (weight, *_) = (
            e for e in in_round(submodel, round_).program.tensors if e.name == "0.weight"
        )
        assert weight.part is not None
        for start, stop in weight.part[0]:
            times[start:stop] += 1
    assert times.tolist() == [4] * 10  # four channels in ten rounds


def test_leading_channels_and_whole_layers_never_move() -> None:
    model = nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 2))
    for spec in ("width:0.5", "width:1,window=rolling", "full"):
        submodel = split(model, spec, (3,))
        assert in_round(submodel, 4).program.tensors == submodel.program.tensors
