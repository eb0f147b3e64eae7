"""Hooks on tensors of a model: those that only look are ignored, others are refused by line."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from exporters.recording.capture import capture
from refusals import refused


class Hooked(nn.Module):
    """Two layers with a hook on the gradient between them."""

    def __init__(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self.first, self.last, self.hook = nn.Linear(4, 5), nn.Linear(5, 3), hook

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if h.requires_grad:
            h.register_hook(self.hook)
        return self.last(h)


@pytest.mark.parametrize(
    "hook", [lambda gradient: gradient.clamp(-0.01, 0.01), torch.neg], ids=["clipped", "reversed"]
)
def test_a_hook_that_changes_a_gradient_is_refused(hook: Callable[[Tensor], Tensor]) -> None:
    with refused("model.gradient-hook") as caught:
        capture(Hooked(hook), (4,))
    assert "h.register_hook(self.hook))" in str(caught.value.values["place"])


def test_hooks_that_change_no_gradient() -> None:
    seen: list[Tensor] = []
    capture(Hooked(seen.append), (4,))
    capture(Hooked(lambda gradient: gradient * 1), (4,))
    assert seen


def endless(gradient: Tensor) -> Tensor:
    while gradient.norm() > 1e-6:
        gradient = gradient * 1.5 / gradient.norm()
    return gradient


class Endless(torch.autograd.Function):
    """A function whose backward pass does not end for random numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return endless(gradients[0])


class Solving(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = Endless.apply(super().forward(input))
        return result


def test_gradients_that_loop_without_end_are_refused() -> None:
    with refused("model.gradient-hook"):
        capture(Hooked(endless), (4,))
    with refused("model.custom-gradient"):
        capture(Solving(4, 3), (4,))
