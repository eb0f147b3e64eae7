"""Models that return more than one tensor: one output is trained."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from exporters.recording.capture import capture


class Scores(NamedTuple):
    logits: Tensor
    hidden: Tensor


RETURNS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "logits": lambda hidden, y: {"hidden": hidden, "logits": y},
    "first of a dictionary": lambda hidden, y: OrderedDict(scores=y, hidden=hidden),
    "tuple": lambda hidden, y: (y, hidden),
    "list": lambda hidden, y: [y, hidden],
    "named tuple": lambda hidden, y: Scores(y, hidden),
    "nested": lambda hidden, y: ({"logits": y}, hidden),
}


@pytest.mark.parametrize("returned", RETURNS)
def test_one_output_of_several_is_trained(returned: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Any:
            hidden = self.first(x).tanh()
            return RETURNS[returned](hidden, self.last(hidden))

    model = Net()
    captured = capture(model, (6,))
    assert captured.classes == 3
    x = torch.randn(4, 6)
    expected = model.last(model.first(x).tanh())
    torch.testing.assert_close(captured.training(x), expected)
    torch.testing.assert_close(captured.inference(x), expected)
    # The user's model stays as it is.
    assert not torch.is_tensor(model(x))
