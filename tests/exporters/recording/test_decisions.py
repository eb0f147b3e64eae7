"""Models whose Python code decides by values, compared with themselves on each way."""

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from exporters.programs.seeded_random import SeededBernoulli
from exporters.recording.capture import capture
from exporters.recording.captured import Captured
from exporters.recording.replacements.random_functions import uniform_draws
from exporters.recording.shared_tensors import twin_of
from parameters import quarter_quick
from refusals import refused

SHAPE = (6,)
Compute = Callable[["Between", Tensor], Tensor]


class Between(nn.Module):
    """Two layers with `compute` between them, and tensors for it."""

    mean: Tensor
    seen: Tensor

    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.norm, self.extra = nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("seen", torch.zeros(()))
        self.compute = compute
        self.calls, self.kept = 0, list[object]()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.last(self.compute(self, self.first(x)))
        return out


def sign(model: Between, h: Tensor) -> Tensor:
    return -h if h.mean() > 0 else h.tanh()


def number(model: Between, h: Tensor) -> Tensor:
    largest = h.detach().abs().max().item()
    if largest > 2:
        h = h / largest
    return functional.dropout(model.norm(h), 0.3, model.training)


def clipped(model: Between, h: Tensor) -> Tensor:
    return h * max(model.scale.item(), 0.5) if min(h.std().item(), 1.0) < 0.9 else h


def mean_of_some(model: Between, h: Tensor) -> Tensor:
    """As in the focal loss of CenterNet; the other way divides by no element."""
    chosen = (h > 1).float()
    count = chosen.sum()
    total, others = (h.sin() * chosen).sum(), (h.cos() * (1 - chosen)).sum()
    if count == 0:
        return h - others
    return h - (total + others) / count


def iterations(model: Between, h: Tensor) -> Tensor:
    steps = 0
    while h.abs().max() > 1 and steps < 5:
        h, steps = model.extra(h) / 2, steps + 1
    return h


def first_batch(model: Between, h: Tensor) -> Tensor:
    if model.training:
        if model.seen == 0:
            model.mean.copy_(h.mean(0).detach())
        else:
            model.mean.lerp_(h.mean(0).detach(), 0.1)
        model.seen += 1
    return h - model.mean


def skipped(model: Between, h: Tensor) -> Tensor:
    for _ in range(2):
        if model.training and torch.rand(1).item() < 0.5:
            continue
        h = h + model.extra(h).tanh()
    return h


def noted(model: Between, h: Tensor) -> Tensor:
    model.kept.append(h.mean().item())
    if model.kept[-1] > 0:  # type: ignore[operator]
        model.kept.clear()
    return h + len(model.kept)


def alike(model: Between, h: Tensor) -> Tensor:
    if torch.equal(h, h.abs()) or torch.allclose(h, torch.zeros(()), atol=3.0):
        return h
    return model.extra(h)


def other_norm(model: Between, h: Tensor) -> Tensor:
    return model.norm(model.norm(h)) if h.mean() > 0 else h


WAYS = (
    mean_of_some,
    sign,
    number,
    clipped,
    iterations,
    first_batch,
    skipped,
    noted,
    alike,
    other_norm,
)


def outcome(run: Callable[[Tensor], Tensor], x: Tensor, seed: int) -> Tensor:
    with SeededBernoulli(seed), uniform_draws():
        return run(x)


def check_equal(model: nn.Module, captured: Captured, x: Tensor, training: bool, seed: int) -> None:
    """Compare output, gradients and buffers of the recording with those of `model`."""
    own = twin_of(model, captured.buffers).train(training)
    graph = captured.training if training else captured.inference
    tensors = {
        n: v.clone().requires_grad_(n in captured.parameters) for n, v in captured.tensors.items()
    }
    right = outcome(own, x, seed)
    recorded = outcome(lambda x: functional_call(graph, tensors, (x,)), x, seed)
    torch.testing.assert_close(recorded, right, rtol=1e-4, atol=1e-5)
    if not training:
        return
    weight = torch.randn(right.shape, generator=torch.Generator().manual_seed(seed))
    (right * weight).sum().backward()
    (recorded * weight).sum().backward()
    for name, parameter in own.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found = tensors[name].grad
        found = torch.zeros_like(parameter) if found is None else found
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4, msg=name)
    for name, buffer in own.named_buffers():
        if name in tensors:
            torch.testing.assert_close(tensors[name].detach(), buffer, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compute", quarter_quick(WAYS))
def test_a_recording_takes_the_way_of_the_model(compute: Compute, seed: int) -> None:
    torch.manual_seed(seed)
    model = Between(compute)
    captured = capture(model, SHAPE)
    assert model.calls == 0
    for size in (0.1, 1.0, 10.0):
        for sign_of in (-1.0, 1.0):
            x = sign_of * size * torch.randn(5, *SHAPE).abs()
            for training in (True, False):
                check_equal(model, captured, x, training, seed)


def test_layers_after_a_decision_exist_once() -> None:
    captured = capture(Between(number), SHAPE)
    names = [str(node.target) for node in captured.training.graph.nodes]
    assert names.count("aten.batch_norm.default") == 1
    assert names.count("aten.linear.default") == 2
    # The choice, and what keeps the gradient of a division to itself that is not computed.
    assert names.count("aten.where.self") == 2


def test_a_check_of_the_samples_is_left_out() -> None:
    def checked(model: Between, h: Tensor) -> Tensor:
        if torch.isnan(h).any():
            raise ValueError("nan")
        assert h.abs().max() < 1e6, "too large"
        return h

    captured = capture(Between(checked), SHAPE)
    assert not any(word in str(captured.training.graph) for word in ("isnan", "where", "assert"))


def test_many_assertions_are_one_path(seed: int) -> None:
    """As in a decoder that asserts in each step; each step may also draw its own choice."""

    def asserting(model: Between, h: Tensor) -> Tensor:
        for _ in range(40):
            assert (h == h.clone()).all()
            assert not torch.isnan(h).any(), "nan"
        return h.tanh() if h.mean() > 0 else h

    torch.manual_seed(seed)
    model = Between(asserting)
    captured = capture(model, SHAPE)
    check_equal(model, captured, torch.randn(5, *SHAPE), True, seed)


def other_size(model: Between, h: Tensor) -> Tensor:
    return (
        h[:, : 4 if h.mean() > 0 else 8].sum(1, keepdim=True).expand(-1, 8)[:, :8]
        * (torch.zeros(4) if h.std() > 1 else torch.zeros(8)).sum()
    )


def without_end(model: Between, h: Tensor) -> Tensor:
    while h.abs().max() > 1:
        h = h / 2
    return h


def always_wrong(model: Between, h: Tensor) -> Tensor:
    if h.mean() > 0:
        raise ValueError("positive")
    raise ValueError("negative")


@pytest.mark.parametrize(
    ("compute", "code", "words"),
    [
        (without_end, "model.data-dependent-code", "a fixed number of iterations"),
        (always_wrong, "model.cannot-record", "negative"),
    ],
)
def test_what_no_graph_can_choose_is_refused_with_the_line(
    compute: Compute, code: str, words: str
) -> None:
    with refused(code) as caught:
        capture(Between(compute), SHAPE)
    assert words in str(caught.value)
    lines, first = inspect.getsourcelines(compute)
    assert any(
        f"test_decisions.py, line {first + n}" in str(caught.value) for n in range(len(lines))
    )


def test_sizes_may_follow_a_decision(seed: int) -> None:
    torch.manual_seed(seed)
    model = Between(other_size)
    captured = capture(model, SHAPE)
    check_equal(model, captured, torch.randn(5, *SHAPE), True, seed)
