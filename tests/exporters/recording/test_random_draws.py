"""Random numbers that a model's own code draws, and decisions by them."""

import math
import random
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from exporters.recording.capture import capture
from exporters.recording.replacements.python_code.python_draws import python_draws
from parameters import quarter_quick
from refusals import refused

SHAPE = (4,)


class Skipping(nn.Module):
    """Layers of which each is skipped with some probability, as layerdrop does."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        skipped = 0
        for layer in self.layers:
            if self.training and np.random.random() < 0.5 and skipped < self.most:
                skipped += 1
                continue
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


def test_choices_that_depend_on_each_other_are_refused() -> None:
    with refused("model.random-numbers") as caught:
        capture(Skipping(most=2), SHAPE)
    assert "np.random.random() < 0.5" in str(caught.value.values["line"])
    assert "Set the probability to 0" in str(caught.value)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: (np.random.rand(4) < 0.5).astype(np.float32).tolist(),
        lambda: random.sample([1.0, 1.0, 0.0, 0.0], 4),
    ],
    ids=["numpy", "python"],
)
def test_masks_drawn_outside_of_torch(draw: Callable[[], list[float]]) -> None:
    with refused("model.random-numbers") as caught:
        capture(Masking(draw), SHAPE)
    assert "numpy or Python's `random`" in str(caught.value)
    assert "test_random_draws.py, line" in str(caught.value)
    capture(Masking(lambda: [1.0, 0.0, 1.0, 1.0]), SHAPE)


@pytest.mark.parametrize(
    "own", [random.Random(1), np.random.default_rng(1)], ids=["python", "numpy"]
)
def test_a_generator_of_the_model_is_refused(own: Any) -> None:
    class Own(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input * self.own.random())  # type: ignore[operator]

    model = Own(4, 3)
    model.own = own
    with refused("model.random-numbers"):
        capture(model, SHAPE)


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

    def __init__(self, choose: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.choose = choose
        self.layer, self.step = nn.Linear(4, 3), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        own = self.step(x)
        return self.layer(self.choose(x, own) if self.training else own)


class Given(TorchDispatchMode):
    """Context in which draws of one number are these, in order."""

    def __init__(self, numbers: Iterable[float]) -> None:
        super().__init__()
        self.numbers = iter(numbers)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.rand.default:
            return torch.tensor(next(self.numbers))
        return func(*args, **(kwargs or {}))


def outputs(model: nn.Module, x: Tensor, draws: Iterable[list[float]]) -> Iterator[Tensor]:
    """What the recording of `model` in training computes for each of the `draws`."""
    graph = capture(model, SHAPE).training
    for numbers in draws:
        with Given(numbers):
            yield functional_call(graph, dict(model.named_parameters()), (x,))


def test_each_layer_is_skipped_by_its_own_number(seed: int) -> None:
    torch.manual_seed(seed)
    model, x, draws = Skipping(most=6), torch.randn(5, 4), torch.rand(20, 6)
    for output, numbers in zip(outputs(model, x, draws.tolist()), draws, strict=True):
        right, kept = x, [layer for layer, u in zip(model.layers, numbers, strict=True) if u >= 0.5]
        for layer in kept:
            right = layer(right)
        right = model.last(right)
        torch.testing.assert_close(output, right)
        weights = list(model.parameters())
        unused = {"allow_unused": True, "materialize_grads": True}
        gradients = (
            torch.autograd.grad(y.square().sum(), weights, **unused) for y in (output, right)
        )
        torch.testing.assert_close(*gradients)


DRAWN: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[float, Tensor, Tensor], Any]]] = {
    "random": (
        lambda x, own: x if random.random() < 0.3 else own,
        lambda u, x, own: x if u < 0.3 else own,
    ),
    "choice": (
        lambda x, own: random.choice([x, own, x + own]),
        lambda u, x, own: [x, own, x + own][int(3 * u)],
    ),
    "weighted": (
        lambda x, own: (x, own, x + own)[np.random.choice(3, p=[0.2, 0.5, 0.3])],
        lambda u, x, own: x if u < 0.2 else own if u < 0.7 else x + own,
    ),
    "numpy": (
        lambda x, own: x if np.random.uniform(0, 2) < 0.5 else own,
        lambda u, x, own: x if 2 * u < 0.5 else own,
    ),
    "factor": (
        lambda x, own: random.uniform(1, 3) * own,
        lambda u, x, own: (1 + 2 * u) * own,
    ),
    "exponential": (
        lambda x, own: own * np.random.exponential(2),
        lambda u, x, own: own * -2 * math.log(1 - u),
    ),
    "rate": (
        lambda x, own: own * random.expovariate(0.5),
        lambda u, x, own: own * -2 * math.log(1 - u),
    ),
    "binomial": (
        lambda x, own: own * np.random.binomial(1, 0.4),
        lambda u, x, own: own if u < 0.4 else 0 * own,
    ),
    "repeated": (
        lambda x, own: x + own * len(range(np.random.randint(1, 4))),
        lambda u, x, own: x + own * (1 + int(3 * u)),
    ),
    "column": (
        lambda x, own: own + x[:, random.randint(0, 3), None],
        lambda u, x, own: own + x[:, int(4 * u), None],
    ),
}


@pytest.mark.parametrize("name", quarter_quick(DRAWN))
def test_a_number_of_python_or_numpy_is_drawn_in_each_step(name: str, seed: int) -> None:
    draw, expected = DRAWN[name]
    torch.manual_seed(seed)
    model, x, draws = Forced(draw), torch.randn(5, 4), torch.rand(20).tolist()
    for output, u in zip(outputs(model, x, ([u] for u in draws)), draws, strict=True):
        torch.testing.assert_close(output, model.layer(expected(u, x, model.step(x))))


def test_steps_are_masked_at_a_drawn_place(seed: int) -> None:
    class Masked(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            input = input.clone()
            if self.training:
                length = np.random.randint(0, 3)
                start = np.random.randint(0, input.shape[1] - length)
                input[:, start : start + length] = 0.5
            return super().forward(input)

    torch.manual_seed(seed)
    model, x, draws = Masked(4, 3), torch.randn(5, 4), torch.rand(20, 2).tolist()
    for output, (u, v) in zip(outputs(model, x, draws), draws, strict=True):
        length = int(3 * u)
        start = int((4 - length) * v)
        h = x.clone()
        h[:, start : start + length] = 0.5
        torch.testing.assert_close(output, nn.functional.linear(h, model.weight, model.bias))


def test_a_decision_by_samples_is_recorded_beside_draws() -> None:
    class Deciding(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input if input.sum() > 0 else -input)

    assert "aten.where" in str(capture(Deciding(4, 3), SHAPE).training.graph)


def test_other_threads_draw_their_own_numbers() -> None:
    """A coordinator records a model in one thread, while others draw for their own purposes."""
    with python_draws(nn.Linear(1, 1)), ThreadPoolExecutor(1) as pool:
        assert isinstance(random.random(), Tensor)
        assert isinstance(pool.submit(random.random).result(), float)
        assert isinstance(pool.submit(np.random.rand).result(), float)
    assert isinstance(random.random(), float)
