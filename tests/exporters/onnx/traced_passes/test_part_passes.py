"""Tensors that are cut into parts and put together again: fewer copies, the same numbers."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from exporters.onnx.traced_passes.graph_passes import shorten
from exporters.programs.tracing import operators, trace
from parameters import half_quick
from training_steps import drawn, train_step

TOKENS, WIDTH, HEADS = 6, 8, 2


class Attention(nn.Module):
    """PyTorch's own attention, or one that joins queries, keys and values as other libraries do."""

    def __init__(self, of_torch: bool) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) if of_torch else None
        self.parts, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(TOKENS * WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.layer is not None:
            return self.out(self.layer(x, x, x, need_weights=False)[0].flatten(1))
        rows = self.parts(x).reshape(-1, TOKENS, 3, HEADS, WIDTH // HEADS)
        query, key, value = rows.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).flatten(1))


@pytest.mark.parametrize("of_torch", half_quick([True, False]))
def test_attention(of_torch: bool, seed: int) -> None:
    torch.manual_seed(seed)
    signature = train_step(Attention(of_torch), (TOKENS, WIDTH))
    graph, feeds = trace(signature), {}
    for batch in (2, 3, 7):
        arrays = drawn(signature, batch, np.random.default_rng(seed))
        feeds[batch] = [torch.from_numpy(arrays[port.name]) for port in signature.inputs]
    before = {batch: graph(*given) for batch, given in feeds.items()}
    after = shorten(graph)
    for batch, given in feeds.items():
        for ours, theirs in zip(after(*given), before[batch], strict=True):
            torch.testing.assert_close(ours, theirs)
    count = Counter(operators(graph))
    assert not {"aten::constant_pad_nd", "aten::bmm", "aten::clone", "aten::view"} & set(count)
    assert count["aten::cat"] == 1
    assert count["aten::select"] + count["aten::slice"] == 3
    # All sizes are read from an input, none from a value that would have to stay in memory.
    sizes = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int)
    assert [node.args[0].op for node in sizes] == ["placeholder"]
    # In the forward pass nothing of the size of all three parts changes the order of its axes.
    moved = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.permute.default)
    shapes = [[n for n in node.meta["val"].shape if isinstance(n, int)] for node in moved]
    assert len([shape for shape in shapes if len(shape) > 2 and 3 in shape]) == (not of_torch)


def pad(x: Tensor, before: int, behind: int) -> Tensor:
    return torch.ops.aten.constant_pad_nd(x, [0, 0, before, behind])


SUMS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    # a function of x and y (2, 3, 4), and whether it puts parts together
    "two": (lambda x, y: pad(x, 0, 3) + pad(y, 3, 0), True),
    "three in any order": (lambda x, y: pad(x, 3, 3) + (pad(y, 6, 0) + pad(x, 0, 6)), True),
    "a gap": (lambda x, y: pad(x, 0, 4) + pad(y, 4, 0), False),
    "overlapping": (lambda x, y: pad(x, 0, 2) + pad(y, 2, 0), False),
    "the same place": (lambda x, y: pad(x, 0, 3) + pad(y, 0, 3), False),
    "cut at an edge": (lambda x, y: pad(x, 0, 2) + pad(y, 3, -1), False),
    "a multiple": (lambda x, y: torch.add(pad(x, 0, 3), pad(y, 3, 0), alpha=2), False),
    "with a multiple": (
        lambda x, y: pad(x, 0, 3) + torch.add(pad(x, 0, 3), y[:1, :1], alpha=2),
        False,
    ),
    "with a number": (lambda x, y: pad(x, 0, 3) + (pad(y, 3, 0) + 1.5), False),
    "other numbers than zero": (
        lambda x, y: torch.ops.aten.constant_pad_nd(x, [0, 0, 0, 3], 1.0) + pad(y, 3, 0),
        False,
    ),
    "two axes": (
        lambda x, y: torch.ops.aten.constant_pad_nd(x, [0, 1, 0, 3]) + pad(y, 3, 0)[..., :1],
        False,
    ),
    "a part that others read": (lambda x, y: (pad(x, 0, 3) + pad(y, 3, 0)) * pad(x, 0, 3), True),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_parts(name: str, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    x, y = (torch.rand(2, 3, 4, generator=draw) for _ in range(2))
    function, together = SUMS[name]
    graph = make_fx(lambda x, y: [function(x, y)], tracing_mode="fake")(x, y)
    (expected,) = graph(x, y)
    (came,) = shorten(graph)(x, y)
    assert torch.equal(came, expected)
    assert Counter(operators(graph))["aten::cat"] == together


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "stacked": lambda x: x.permute(2, 0, 1, 3),
    "with an axis of its own": lambda x: x.unsqueeze(0).transpose(0, 3).squeeze(3),
    "twice": lambda x: x.permute(3, 2, 1, 0).unsqueeze(2).permute(1, 4, 2, 0, 3),
    "not at all": lambda x: x.unsqueeze(1).squeeze(1).transpose(0, 2),
}


@pytest.mark.parametrize("name", MOVES)
def test_parts_of_moved_tensors(name: str, seed: int) -> None:
    """Also from behind, and with sizes that are alike."""
    x = torch.rand(3, 3, 3, 4, generator=torch.Generator().manual_seed(seed))

    def function(x: Tensor) -> list[Tensor]:
        moved = MOVES[name](x)
        chosen = [moved.select(axis, -1) + 1 for axis in range(moved.dim())]
        return [*chosen, *(moved.narrow(axis, 0, 1) * 2 for axis in range(moved.dim()))]

    graph = make_fx(function, tracing_mode="fake")(x)
    expected = function(x)
    came = shorten(graph)(x)
    assert all(map(torch.equal, came, expected))
    assert [tensor.shape for tensor in came] == [tensor.shape for tensor in expected]


def test_windows_of_a_moved_tensor_stay(seed: int) -> None:
    """Together they are larger than the tensor, whose axes move once."""
    x = torch.rand(5, 6, 4, generator=torch.Generator().manual_seed(seed))

    def function(x: Tensor) -> list[Tensor]:
        moved = x.permute(2, 0, 1)
        return [moved.narrow(1, first, 3) + 1 for first in range(3)]

    graph = make_fx(function, tracing_mode="fake")(x)
    expected = graph(x)
    assert all(map(torch.equal, shorten(graph)(x), expected))
    assert Counter(operators(graph))["aten::permute"] == 1
