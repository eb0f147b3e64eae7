"""Code that fixes the number of samples: the line is named, and what to write instead works."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from exporters.recording.capture import capture
from parameters import half_quick
from refusals import refused

Compute = Callable[["Written", Tensor], Tensor]


class Written(nn.Module):
    """Layers with `compute` between them, which may use a norm and a tensor of 5 rows."""

    rows: Tensor

    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(6, 8), nn.Linear(8, 3), nn.BatchNorm1d(8)
        self.register_buffer("rows", torch.randn(5, 8))
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.compute(self, self.first(x)))


def copied(model: Written, h: Tensor) -> Tensor:
    begin = torch.stack(list([model.rows[0]] * h.size(0)))  # here
    return h + begin


def collected(model: Written, h: Tensor) -> Tensor:
    states = [model.rows[0] for _ in range(h.shape[0])]  # here
    return h + torch.stack(states)


def expanded(model: Written, h: Tensor) -> Tensor:
    return h + model.rows[0].expand(h.shape[0], -1)


def divided(model: Written, h: Tensor) -> Tensor:
    return torch.cat([model.norm(part) for part in h.split(2)])  # here


def halved(model: Written, h: Tensor) -> Tensor:
    first, second = h.chunk(2)  # here
    return model.norm(torch.cat([second, first]))


def undivided(model: Written, h: Tensor) -> Tensor:
    return model.norm(h)


def grouped(model: Written, h: Tensor) -> Tensor:
    groups = h.view(3, -1, 8)  # here
    return (groups - groups.mean(1, keepdim=True)).view(-1, 8)


def ungrouped(model: Written, h: Tensor) -> Tensor:
    return (h.view(-1, 2, 4) - h.view(-1, 2, 4).mean(1, keepdim=True)).view(-1, 8)


def cached(model: Written, h: Tensor) -> Tensor:
    if not model.training:
        model.rows[: h.shape[0]] = h  # here
        return model.rows[: h.shape[0]]
    return h


def sliced(model: Written, h: Tensor) -> Tensor:
    return h + model.rows[: h.shape[0]]  # here


def made(model: Written, h: Tensor) -> Tensor:
    rows = torch.zeros(h.shape[0], 8)
    rows[:, 1:] = h[:, 1:]
    return rows


def branched(model: Written, h: Tensor) -> Tensor:
    return -h if h.shape[0] > 20 else h  # here


def asserted(model: Written, h: Tensor) -> Tensor:
    assert h.shape[0] % 4 == 0  # here
    return h


def queued(model: Written, h: Tensor) -> Tensor:
    assert 24 % h.shape[0] == 0  # here
    return h


def enqueued(model: Written, h: Tensor) -> Tensor:
    scores = h @ model.rows.clone().T
    if model.training:
        model.rows.copy_(torch.cat([h.detach(), model.rows])[:5])
    return h + scores.mean(1, keepdim=True)


def routed(model: Written, h: Tensor) -> Tensor:
    chosen = h.topk(max(1, int(h.shape[0] * 0.5)), 0).values  # here
    return h + chosen.mean(0)


def routed_within(model: Written, h: Tensor) -> Tensor:
    return h + h.topk(4, 1).values.mean(1, keepdim=True)


def straight(model: Written, h: Tensor) -> Tensor:
    return -h


@pytest.mark.parametrize(
    ("compute", "words", "instead"),
    half_quick(
        [
            (copied, "x.expand(n, ...)", expanded),
            (collected, "x.expand(n, ...)", expanded),
            (divided, "batch norm of the whole batch", undivided),
            (halved, "Do not divide a batch", undivided),
            (grouped, "make no groups of samples", ungrouped),
            (cached, "more than 5 samples", made),
            (sliced, "make the tensor in forward", made),
            (asserted, "leave the check out", straight),
            (queued, "self.queue.copy_(torch.cat(", enqueued),
            (routed, "choose within a sample", routed_within),
            (branched, "Do not branch on x.shape[0].", straight),
        ]
    ),
)
def test_the_line_is_named_and_the_remedy_is_recorded(
    compute: Compute, words: str, instead: Compute
) -> None:
    with refused("model.fixed-batch") as caught:
        capture(Written(compute), (6,))
    place, _, code = str(caught.value.values["place"]).partition(": ")
    assert place.startswith(" (test_fixed_sizes.py, line ") or "/test_fixed_sizes.py" in place
    assert code.endswith("# here)")
    assert words in str(caught.value)
    capture(Written(instead), (6,))


def test_sizes_of_a_reshape_that_fit_other_samples() -> None:
    model = nn.Sequential(nn.Conv1d(2, 2, 1), ViewedAs(16), nn.Linear(16, 3))
    with refused("model.cannot-record") as caught:
        capture(model, (2, 7))
    assert "return x.view(-1, self.size)" in str(caught.value)
    assert "change --input-shape" in str(caught.value)
    capture(model, (2, 8))


class ViewedAs(nn.Module):
    """Rows of `size` numbers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1, self.size)


def test_a_state_of_a_fixed_number_of_samples() -> None:
    with refused("model.cannot-record", "make it in forward, as in torch.zeros(x.shape[0], 8)"):
        capture(Written(lambda model, h: h + model.rows), (6,))
    capture(Written(made), (6,))
