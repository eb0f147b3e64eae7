"""Hooks on tensors of a model: those that only look are ignored, others are refused by line."""

from collections.abc import Callable

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
