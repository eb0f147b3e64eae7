"""Models that cut sequences to the longest of the batch, compared with themselves."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from exporters.recording.capture import capture
from parameters import half_quick
from refusals import refused

SHAPE = (9,)
Read = Callable[["Text", Tensor, Tensor], Tensor]


class Text(nn.Module):
    """A text classifier that drops the padding that all texts of a batch have at the end."""

    def __init__(self, read: Read) -> None:
        super().__init__()
        self.embedded, self.last = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 3)
        self.rnn, self.dropout = nn.GRU(8, 8, batch_first=True), nn.Dropout(0.3)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        mask = x != 0
        longest = mask.sum(1).max().item()
        x, mask = x[:, :longest], mask[:, :longest]
        h, _ = self.rnn(self.dropout(self.embedded(x)))
        return self.last(self.read(self, h, mask))


def attended(model: Text, h: Tensor, mask: Tensor) -> Tensor:
    scores = h.sum(2).masked_fill(~mask, -1e9).softmax(1)
    return (scores.unsqueeze(2) * h).sum(1)


def mean(model: Text, h: Tensor, mask: Tensor) -> Tensor:
    lengths = mask.sum(1)
    counted = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    return (h * counted.unsqueeze(2)).sum(1) / lengths.clamp(min=1).unsqueeze(1)


def last_real(model: Text, h: Tensor, mask: Tensor) -> Tensor:
    return h[torch.arange(h.shape[0]), mask.sum(1).clamp(min=1) - 1]


def last(model: Text, h: Tensor, mask: Tensor) -> Tensor:
    return h[:, -1]


def plain_mean(model: Text, h: Tensor, mask: Tensor) -> Tensor:
    return h.mean(1)


@pytest.mark.parametrize("read", half_quick([attended, mean, last_real]))
def test_masked_steps_may_be_cut(read: Read, seed: int) -> None:
    torch.manual_seed(seed)
    model = Text(read)
    captured = capture(model, SHAPE)
    x = torch.randint(1, 20, (4, *SHAPE)) * (torch.arange(9) < torch.tensor([[3], [1], [7], [6]]))
    graph = functional_call(captured.inference, dict(model.named_parameters()), (x,))
    torch.testing.assert_close(graph[0] if isinstance(graph, tuple) else graph, model.eval()(x))


@pytest.mark.parametrize("read", [last, plain_mean])
def test_steps_that_count_may_not_be_cut(read: Read) -> None:
    with refused("model.data-dependent-size") as caught:
        capture(Text(read), SHAPE)
    assert "x, mask = x[:, :longest], mask[:, :longest]" in str(caught.value)
    assert "torch.arange(n) < lengths.unsqueeze(1)" in str(caught.value)


def test_a_cut_that_no_sample_shows_is_refused() -> None:
    class Padded(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            longest = (input != 77).sum(1).max()
            return super().forward(input)[:, :longest]

    with refused("model.data-dependent-size"):
        capture(Padded(4, 3), (4,))
