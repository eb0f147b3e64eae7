"""Passes over traced steps: fewer operators, the same numbers."""

from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from exporters.onnx.traced_passes.graph_passes import (
    accumulate_products,
    cancel_permutations,
    repeat_while_computing,
    shorten,
)
from exporters.programs.program import ProgramSignature
from exporters.programs.tracing import operators, trace
from training_steps import drawn, train_step

aten = torch.ops.aten


def inputs_of(signature: ProgramSignature, seed: int) -> list[Tensor]:
    feeds = drawn(signature, 5, np.random.default_rng(seed))
    return [torch.from_numpy(feeds[port.name]) for port in signature.inputs]


@pytest.mark.parametrize(("momentum", "decay"), [(0.9, 0.0), (0.0, 0.1), (0.9, 0.1), (0.0, 0.0)])
def test_a_step_gets_shorter_and_computes_the_same(
    momentum: float, decay: float, seed: int
) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 3))
    signature = train_step(model, (20,), momentum=momentum, weight_decay=decay)
    graph, feeds = trace(signature), inputs_of(signature, seed)
    before, count = graph(*feeds), Counter(operators(graph))
    after = shorten(graph)(*feeds)
    for ours, theirs in zip(after, before, strict=True):
        torch.testing.assert_close(ours, theirs)
    less = count - Counter(operators(graph))
    assert less["aten::permute"] >= 4
    # Both weights: the product takes the scaled velocity in, or the weight itself.
    fewer = [less[f"aten::{name}"] for name in ("mm", "mul", "add", "sub")]
    assert fewer == ([2, 2, 2, 0] if momentum else [0] * 4 if decay else [2, 0, 0, 2])


def traced(function: object, *example: Tensor) -> GraphModule:
    graph = make_fx(function)(*example)
    assert isinstance(graph, GraphModule)
    return graph


def test_permutations_are_put_together(seed: int) -> None:
    x = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(seed))
    graph = traced(lambda t: t.permute(1, 2, 0).permute(0, 2, 1) + 1, x)
    expected = graph(x)
    cancel_permutations(graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    assert torch.equal(graph(x), expected)
    assert Counter(operators(graph))["aten::permute"] == 1


def test_a_product_that_is_read_twice_stays(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    a, b, c = (torch.rand(3, 3, generator=draw) for _ in range(3))

    def function(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        product = a @ b
        return product, 0.5 * c + product

    graph = traced(function, a, b, c)
    accumulate_products(graph)
    assert "aten::addmm" not in set(operators(graph))


@pytest.mark.parametrize(
    ("function", "copies"),
    [
        (lambda x, y: x.expand(3, 4) / 4 + y, 0),
        (lambda x, y: y * x.expand(3, 4), 0),
        (lambda x, y: torch.tanh(x.expand(3, 4) / 4) + y, 1),
        (lambda x, y: x.expand(3, 4) + x.expand(3, 4), 1),  # the sum needs the larger shape
        (lambda x, y: torch.stack([x.expand(3, 4), x.expand(3, 4) / 4 - y]), 2),
    ],
)
def test_operators_repeat_small_tensors(function: object, copies: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.rand(3, 1, generator=draw), torch.rand(3, 4, generator=draw)
    graph = traced(function, x, y)
    expected = graph(x, y)
    repeat_while_computing(graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    torch.testing.assert_close(graph(x, y), expected)
    assert Counter(operators(graph))["aten::expand"] == copies


class Rows(nn.Module):
    """The gradient of the first layer's result is a product times a half."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * 0.5).mean(1)


def test_the_smaller_factor_is_scaled(seed: int) -> None:
    torch.manual_seed(seed)
    signature = train_step(Rows(), (5, 6))
    graph, feeds = trace(signature), inputs_of(signature, seed)
    before = graph(*feeds)
    for ours, theirs in zip(shorten(graph)(*feeds), before, strict=True):
        torch.testing.assert_close(ours, theirs)
    halves = [
        node.args[0].meta["val"].shape
        for node in graph.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
        if node.args[1] == 0.5
    ]
    assert sorted(map(len, halves)) == [2, 3]  # the weight (3, 4), and rows of the forward pass
