"""Models that change or average elements where a mask is true, compared with themselves."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from exporters.recording.capture import capture
from parameters import half_quick
from refusals import refused

Compute = Callable[[Tensor], Tensor]


class Between(nn.Module):
    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.first, self.last, self.compute = nn.Linear(6, 8), nn.Linear(8, 3), compute

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.compute(self.first(x).clone()))
        return out


def same_mask(h: Tensor) -> Tensor:
    mask = h > 0
    h[mask] = torch.log(h[mask]) * 0.1
    h[mask] += 2
    return h


def same_comparison(h: Tensor) -> Tensor:
    h[h < 0] = h[h < 0] * 0.1
    h[h > 1] **= 0.5
    return h


def rows(h: Tensor) -> Tensor:
    chosen = h.mean(1) > 0
    h[chosen] = h[chosen].tanh() - h[chosen].mean() + h[chosen].sum()
    return h


def of_another(h: Tensor) -> Tensor:
    other, mask = h.flip(1), h > 0.5
    h[mask] = other[mask] + h[mask]
    return h


@pytest.mark.parametrize("compute", half_quick([same_mask, same_comparison, rows, of_another]))
def test_masked_elements_and_their_gradients(compute: Compute, seed: int) -> None:
    torch.manual_seed(seed)
    model = Between(compute)
    graph = capture(model, (6,)).training
    for x in 3 * torch.randn(3, 5, 6):
        expected, recorded = model(x), graph(x)
        torch.testing.assert_close(recorded, expected, rtol=1e-4, atol=1e-5)
        own, other = (
            torch.autograd.grad(y.sin().sum(), [model.first.weight if m is model else w])
            for y, m, w in (
                (expected, model, model.first.weight),
                (recorded, graph, graph.get_parameter("first.weight")),
            )
        )
        torch.testing.assert_close(other, own, rtol=1e-3, atol=1e-4)


def changed_between(h: Tensor) -> Tensor:
    chosen = h[h > 0]
    h += 1
    h[h > 0] = chosen.repeat(3)[: (h > 0).sum()]
    return h


def as_a_list(h: Tensor) -> Tensor:
    return h + h[h > 0].median()


def clamped(h: Tensor) -> Tensor:
    chosen = h[h > 50]
    chosen.clamp_(max=60)
    h[h > 50] = chosen
    return h


def filled(h: Tensor) -> Tensor:
    chosen = h[h > 50]
    chosen[:] = 3
    h[h > 50] = chosen
    return h


def by_a_tensor(h: Tensor) -> Tensor:
    other, positive = h + 1, h > 0
    h[positive] = h[positive].clamp(max=other[positive])
    return h


@pytest.mark.parametrize("compute", [changed_between, as_a_list, clamped, filled, by_a_tensor])
def test_other_uses_of_selected_elements_are_refused(compute: Compute) -> None:
    with refused("model.data-dependent-size") as caught:
        capture(Between(compute), (6,))
    assert "test_masked_values.py, line" in str(caught.value)
