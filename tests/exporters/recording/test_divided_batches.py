"""Models that divide a batch into parts: recorded for batches that are one part."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from exporters.recording.capture import capture
from exporters.recording.sizes.divided_batches import check_whole
from refusals import refused

SHAPE, PART = (6,), 8


class Ghost(nn.Module):
    """Normalises parts of a batch, which `divide` makes."""

    def __init__(self, divide: Callable[[Tensor], tuple[Tensor, ...]], when: str = "norm") -> None:
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(6, 8), nn.Linear(8, 3), nn.BatchNorm1d(8)
        self.divide, self.when = divide, when

    def forward(self, x: Tensor) -> Tensor:
        parts = self.divide(self.first(x))
        if self.when == "mean":
            parts = tuple(part - part.mean(0) for part in parts)
        return self.last(torch.cat([self.norm(part) for part in parts], 0))


DIVIDE: dict[str, tuple[Callable[[Tensor], tuple[Tensor, ...]], int]] = {
    "ceil": (lambda h: h.chunk(int(np.ceil(h.shape[0] / PART)), 0), PART),
    "floor": (lambda h: h.chunk(max(1, h.size(0) // PART), 0), 2 * PART - 1),
    "none": (lambda h: torch.chunk(h, -(-h.shape[0] // PART), 0), PART),
}


@pytest.mark.parametrize("name", DIVIDE)
def test_batches_of_one_part_are_recorded(name: str, seed: int) -> None:
    divide, most = DIVIDE[name]
    torch.manual_seed(seed)
    model = Ghost(divide)
    captured = capture(model, SHAPE)
    check_whole(model, captured, most)
    with refused("model.fixed-batch", "test_divided_batches.py, line", samples=most + 1):
        check_whole(model, captured, most + 1)
    x = torch.randn(most, *SHAPE)
    torch.testing.assert_close(captured.training(x), model.train()(x))


def test_parts_that_change_predictions_are_refused(seed: int) -> None:
    torch.manual_seed(seed)
    model = Ghost(DIVIDE["ceil"][0], "mean")
    with refused("model.fixed-batch", samples=4 * PART):
        check_whole(model, capture(model, SHAPE), PART)
