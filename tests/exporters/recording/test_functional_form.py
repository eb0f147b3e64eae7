"""Recorded graphs without in-place writes compute what the model computes."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from exporters.programs.recorded_graph import writes_in_place
from exporters.programs.seeded_random import SeededBernoulli
from exporters.recording.capture import record
from profiles.errors import ModelError

SHAPE = (2, 3, 4)
VIEWS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda t: t.transpose(0, t.dim() - 1),
    lambda t: t.movedim(0, -1),
    lambda t: t[1:],
    lambda t: t[..., :1],
    lambda t: t[-1:, ...],
    lambda t: t.select(-1, 0).unsqueeze(0),
    lambda t: t.contiguous(),
    lambda t: t.unsqueeze(0),
    lambda t: t.flatten(),
    lambda t: t.squeeze(),
    lambda t: t.narrow(-1, 0, 1),
    lambda t: t.T if t.dim() == 2 else t.swapaxes(0, -1),
)
WRITES: tuple[Callable[[Tensor, Tensor], object], ...] = (
    lambda t, other: t.relu_(),
    lambda t, other: t.mul_(1.5),
    lambda t, other: t.add_(other, alpha=2),
    lambda t, other: t.sub_(0.25),
    lambda t, other: t.fill_(0.5),
    lambda t, other: t.fill_(other),
    lambda t, other: t.zero_(),
    lambda t, other: t.copy_(other),
    lambda t, other: t.masked_fill_(t > 0.5, 0.125),
    lambda t, other: t.clamp_(-1, 1),
    lambda t, other: nn.functional.hardtanh(t, -0.75, 0.75, inplace=True),
)


class Writing(nn.Module):
    """A model with random views of its activation and random writes into them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.steps = [
            (draw.choice(VIEWS), draw.choice(WRITES), draw.random(), draw.random() < 0.6)
            for _ in range(draw.randint(2, 8))
        ]
        self.first, self.last = nn.Linear(5, 24), nn.Linear(24, 2)

    def forward(self, x: Tensor) -> Tensor:
        whole = self.first(x).reshape(-1, *SHAPE).permute(1, 2, 3, 0)
        tensors, total = [whole], x.new_zeros(())
        for view, write, which, writes in self.steps:
            chosen = tensors[int(which * len(tensors))]
            if writes:
                write(chosen, total.detach())
                total = total + tensors[int(which * 7) % len(tensors)].mean()
            elif chosen.dim() > 1:
                tensors.append(view(chosen))
        total = total + torch.stack([tensor.square().mean() for tensor in tensors]).sum()
        return self.last(whole.permute(3, 0, 1, 2).flatten(1)) + total


def test_random_writes(seed: int) -> None:
    recorded = 0
    for number in range(100):
        torch.manual_seed(seed + number)
        model = Writing(seed + number).eval()
        try:
            graph = record(model, (5,), "float32", training=False)
        except ModelError:
            continue  # it views the batch by a fixed number
        assert not [node for node in graph.graph.nodes if writes_in_place(node)]
        x = torch.randn(4, 5)
        with torch.no_grad():
            expected = model(x)
            if not torch.isfinite(expected).all():
                continue  # sums of squares of sums may overflow
            torch.testing.assert_close(graph(x), expected)
        recorded += 1
        if recorded == 8:
            return
    raise AssertionError("too few models can be recorded")


class InPlace(nn.Module):
    """What stock models do: activations, sums, dropouts and parts of tensors in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.act, self.drop = nn.Hardswish(inplace=True), nn.Dropout(0.5, inplace=True)
        self.last = nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.act(self.norm(self.conv(x)))
        out += x[:, :1]
        out[:, 0] *= 0.5
        out[:, 1, 0] = 0.25
        return self.last(self.drop(nn.functional.silu(out, inplace=True).flatten(1)))


@pytest.mark.parametrize("training", [True, False])
def test_gradients_and_statistics(seed: int, training: bool) -> None:
    torch.manual_seed(seed)
    model = InPlace()
    graph = record(model, (3, 4, 4), "float32", training)
    assert not [node for node in graph.graph.nodes if writes_in_place(node)]
    model.train(training)
    x, weight = torch.randn(5, 3, 4, 4), torch.randn(5, 2)
    parameters = dict(model.named_parameters())
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    with SeededBernoulli(0):
        came = torch.func.functional_call(graph, {**parameters, **buffers}, (x,))
    with SeededBernoulli(0):
        expected = model(x)
    torch.testing.assert_close(came, expected)
    for ours, theirs in zip(
        torch.autograd.grad((came * weight).sum(), parameters.values()),
        torch.autograd.grad((expected * weight).sum(), parameters.values()),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_writes_without_a_functional_form_stay() -> None:
    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.last(x)
            x.as_strided((2,), (1,), 0).zero_()
            return x.relu_()

    graph = record(Strided(), (6,), "float32", training=False)
    targets = [str(node.target) for node in graph.graph.nodes if writes_in_place(node)]
    assert targets == ["aten.zero_.default", "aten.relu_.default"]
