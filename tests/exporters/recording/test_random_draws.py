"""Random decisions of a model's own code: each is refused, and the way out works."""

import inspect
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from exporters.recording.capture import capture
from refusals import refused

SHAPE = (4,)


class Skipping(nn.Module):
    """Layers of which each is skipped with some probability, as layerdrop does."""

    def __init__(self, rate: float, layers: int = 7) -> None:
        super().__init__()
        self.rate = rate
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(layers)])
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            drawn = torch.rand([]) if self.training else torch.ones([])
            if self.rate == 0 or drawn >= self.rate:
                x = layer(x)
        return self.last(x)


class Masking(nn.Module):
    """A model that hides some features with a mask drawn outside of torch, as SpecAugment does."""

    def __init__(self, draw: Callable[[], list[float]]) -> None:
        super().__init__()
        self.draw = draw
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * torch.tensor(self.draw()) if self.training else x)


def test_layers_that_are_skipped_at_random() -> None:
    with refused("model.random-numbers") as caught:
        capture(Skipping(0.5), SHAPE)
    assert "drawn = torch.rand([])" in str(caught.value.values["line"])
    assert "Set the probability to 0" in str(caught.value)
    capture(Skipping(0.0), SHAPE)
    capture(Skipping(0.5, layers=2), SHAPE)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: (np.random.rand(4) < 0.5).astype(np.float32).tolist(),
        lambda: [float(random.random() < 0.5) for _ in range(4)],
    ],
    ids=["numpy", "python"],
)
def test_masks_drawn_outside_of_torch(draw: Callable[[], list[float]]) -> None:
    with refused("model.random-numbers") as caught:
        capture(Masking(draw), SHAPE)
    assert "numpy or Python's `random`" in str(caught.value)
    assert "test_random_draws.py, line" in str(caught.value)
    capture(Masking(lambda: [1.0, 0.0, 1.0, 1.0]), SHAPE)


def test_predictions_use_the_same_numbers_for_each_sample(seed: int) -> None:
    class Noisy(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            steps = super().forward(input).unsqueeze(0).expand(2, -1, -1)
            return (steps + torch.randn_like(steps)).transpose(0, 1)

    torch.manual_seed(seed)
    model = Noisy(4, 4096)
    graph, x = capture(model, SHAPE).inference, torch.randn(6, 4)
    noise = (graph(x) - nn.functional.linear(x, model.weight, model.bias).unsqueeze(1)).detach()
    torch.testing.assert_close(noise, noise[:1].expand(6, -1, -1), rtol=0, atol=1e-5)
    torch.testing.assert_close(graph(x[2:]), graph(x)[2:])
    # The standard errors of 8192 normal numbers are about 0.01.
    assert abs(float(noise[0].mean())) < 0.06
    assert abs(float(noise[0].std()) - 1) < 0.05
    assert float((noise[0, 0] * noise[0, 1]).mean()) < 0.1


class Forced(nn.Module):
    """A decoder that sometimes takes the true step in place of its own, by `choose`."""

    def __init__(self, choose: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.choose = choose
        self.layer, self.step = nn.Linear(4, 3), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        own = self.step(x)
        return self.layer(self.choose(x, own) if self.training else own)


@pytest.mark.parametrize(
    "toss",
    [
        lambda x, own: x if random.random() < 0.5 else own,
        lambda x, own: random.choice([x, own]),
        lambda x, own: x if np.random.uniform() < 0.5 else own,
    ],
    ids=["random", "choice", "numpy"],
)
def test_a_toss_by_python_is_named_and_one_by_torch_is_recorded(
    toss: Callable[[Tensor, Tensor], Tensor],
) -> None:
    with refused("model.random-numbers") as caught:
        capture(Forced(toss), SHAPE)
    lines, first = inspect.getsourcelines(toss)
    assert f"line {first}: {lines[0].strip()})" in str(caught.value)
    assert "torch.where(torch.rand(()) < p, a, b)" in str(caught.value)
    capture(Forced(lambda x, own: torch.where(torch.rand(()) < 0.5, x, own)), SHAPE)


def test_a_decision_by_samples_is_recorded_beside_draws() -> None:
    class Deciding(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input if input.sum() > 0 else -input)

    assert "aten.where" in str(capture(Deciding(4, 3), SHAPE).training.graph)
