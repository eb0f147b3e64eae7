"""Blocked forms of training steps give the numbers of PyTorch's float64 autograd.

The blocked operators are computed here by their definition, on arrays, for both block sizes. Where
this machine's runtime has blocked convolutions, they run there, too.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn

from device_agent.formats.graph_forms import BLOCKS, blocked_form, form_file
from device_agent.runtime.blocked_probe import block_size
from exporters.memory.liveness import execution_order
from exporters.memory.onnx_footprint import SizedGraph
from exporters.onnx.forms import (
    blocked_depthwise_gradient,
    blocked_sums,
    blocked_weight_gradient,
)
from exporters.onnx.forms.blocked_layout import DOMAIN, blocked, rewrite, way_to_rewrite
from exporters.onnx.forms.blocked_weight_gradient import divisors
from exporters.onnx.forms.graph_rewriting import rewritten
from exporters.onnx.onnx_writer import to_onnx
from exporters.programs.program import Recomputation
from form_cases import FIRST_BATCH, Case, check_by_definition, check_in_runtime, tail
from parameters import half_quick, quarter_quick, some_long
from training_steps import train_step


class Residual(nn.Module):
    """Two convolutions with batch norms around a shortcut, smooth but for one ReLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.last = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.norm(self.first(x)))
        return torch.sigmoid(self.last(self.second(y)) + x)


class Squeezed(nn.Module):
    """A depthwise convolution whose channels are weighed by what all pixels say."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.wide = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.down, self.up = nn.Conv2d(channels, 16, 1), nn.Conv2d(16, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.wide(x))
        weight = torch.sigmoid(self.up(F.silu(self.down(y.mean((2, 3), keepdim=True)))))
        return y * weight


class Joined(nn.Module):
    """Channels side by side, as in DenseNet."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.more = nn.Conv2d(channels, 16, (1, 3), padding=(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, torch.tanh(self.more(x))], 1)


class Scaled(nn.Module):
    """The gradient of the second layer's result is a sum over pixels that nothing else reads."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(3, 16, 3, padding=1)
        self.scale = nn.Conv2d(3, 16, (6, 5), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.image(x)) * self.scale(x)


class Normed(nn.Module):
    """The norm comes first, so its sums read the plain form of what the shortcut adds, too."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm2d(channels, affine=True)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(torch.tanh(self.norm(x)))


class Shuffled(nn.Module):
    """The shuffle of ShuffleNet. One reshape joins it with that of a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1, 2, 8, 8, 8).transpose(1, 2).reshape(-1, 16, 8, 8)


def rectified() -> nn.Module:
    """Every second channel of the ReLU is far above zero and the others far below: no kinks."""
    first, second = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 16, 3)
    with torch.no_grad():
        first.bias[::2], first.bias[1::2] = 0.4, -0.4  # type: ignore[index]
        first.weight /= 10
    return nn.Sequential(first, nn.ReLU(), second, nn.Tanh(), *tail(16))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    # model, sample shape, at least so many blocked convolutions with block 16
    "residual": (lambda: nn.Sequential(nn.Conv2d(3, 16, 3), Residual(16), *tail(16)), (3, 7, 6), 8),
    "normed first": (
        lambda: nn.Sequential(nn.Conv2d(3, 16, 3), Normed(16), Normed(16), *tail(16)),
        (3, 8, 7),
        5,
    ),
    "strided": (
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 32, 3, 2, 1), nn.Softplus(), nn.Conv2d(32, 16, (3, 2), (2, 1), (1, 0))),
            *(nn.Sigmoid(), nn.Conv2d(16, 32, 3, padding=2, dilation=2), nn.Tanh(), *tail(32)),
        ),
        (2, 11, 9),
        7,
    ),
    "shuffled": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 16, 1), Shuffled(), nn.Conv2d(16, 16, 3, groups=16), nn.Tanh()),
            *tail(16),
        ),
        (3, 8, 8),
        1,
    ),
    "depthwise": (
        lambda: nn.Sequential(nn.Conv2d(16, 32, 1), Squeezed(32), nn.Conv2d(32, 16, 1), *tail(16)),
        (16, 5, 6),
        10,
    ),
    "depthwise, strided": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 3, 2, 1, groups=32, bias=False), nn.Tanh()),
            *(nn.Conv2d(32, 32, (3, 5), padding=(0, 1), groups=32), nn.Tanh(), *tail(32)),
        ),
        (3, 13, 15),
        8,
    ),
    "depthwise, dilated": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 32, 3), nn.Tanh()),
            *(nn.Conv2d(32, 32, 3, padding=2, dilation=2, groups=32), nn.Tanh()),
            *(nn.Conv2d(32, 32, 3, 2, (1, 3), (2, 3), groups=32), nn.Tanh(), *tail(32)),
        ),
        (3, 13, 15),
        7,
    ),
    "strided, whole steps": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 32, 3, padding=1), nn.Tanh(), nn.Conv2d(32, 16, 3, 2, 1), nn.Tanh()),
            *(nn.Conv2d(16, 32, (1, 3), (1, 2), (0, 1)), nn.Tanh()),
            *(nn.Conv2d(32, 16, (3, 4), (3, 2), (0, 1)), *tail(16)),
        ),
        (3, 12, 24),
        11,
    ),
    "strided, points": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1), nn.Tanh(), nn.Conv2d(16, 32, 1, 2), nn.Tanh()),
            *(
                nn.Conv2d(32, 16, 2, (2, 1)),
                nn.Tanh(),
                nn.Conv2d(16, 32, (3, 1), (1, 2)),
                nn.Tanh(),
            ),
            *tail(32),
        ),
        (3, 12, 10),
        11,
    ),
    "one dimension behind two": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 16, 3), nn.Tanh(), nn.Conv2d(16, 32, 3), nn.Tanh()),
            *(nn.Flatten(2), nn.Conv1d(32, 16, 3), nn.Unflatten(2, (2, 5)), *tail(16)),
        ),
        (3, 7, 8),
        4,
    ),
    "joined": (
        lambda: nn.Sequential(nn.Conv2d(3, 16, 3), Joined(16), nn.Conv2d(32, 16, 3), *tail(16)),
        (3, 9, 8),
        8,
    ),
    "rectified": (rectified, (3, 8, 7), 5),
    "few outputs": (
        lambda: nn.Sequential(nn.Conv2d(3, 64, 3), nn.Tanh(), nn.Conv2d(64, 16, 3), *tail(16)),
        (3, 14, 13),
        5,
    ),
    "narrow between": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 16, 3), nn.Tanh(), nn.Conv2d(16, 4, (3, 1), (2, 1), (1, 0))),
            *(nn.Conv2d(4, 32, (1, 3)), nn.Tanh(), nn.Conv2d(32, 4, (1, 2)), nn.Tanh()),
            *(nn.Conv2d(4, 16, 1), *tail(16)),
        ),
        (3, 9, 8),
        7,
    ),
    "fits in part": (
        lambda: nn.Sequential(nn.Conv2d(3, 16, 3), nn.GELU(), nn.Conv2d(16, 20, 3), *tail(20)),
        (3, 8, 8),
        2,
    ),
    "summed": (lambda: nn.Sequential(Scaled(), *tail(16)), (3, 6, 5), 1),
    "pooled": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 16, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1)),
            *(nn.Tanh(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(32, 16, 1), nn.Tanh(), *tail(16)),
        ),
        (3, 12, 11),
        7,
    ),
    "dropped out": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 16, 3), nn.Tanh(), nn.Dropout(0.3), nn.Conv2d(16, 32, 3), nn.Tanh()),
            *(nn.Dropout(0.2), *tail(32)),
        ),
        (3, 8, 7),
        3,
    ),
    "hard": (  # far from the kinks of the activation
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 32, 3), nn.Hardswish(), nn.Conv2d(32, 16, 3), nn.Hardswish(), *tail(16)),
        ),
        (3, 9, 8),
        5,
    ),
    "points": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 16, 1), nn.Tanh(), nn.Conv2d(16, 48, 1), nn.Tanh()),
            *(nn.Conv2d(48, 32, 1), nn.Tanh(), nn.Conv2d(32, 32, 1, 2), *tail(32)),
        ),
        (3, 8, 6),
        9,
    ),
}


NAMES = quarter_quick(
    some_long(
        MODELS,
        *("depthwise, strided", "depthwise, dilated", "hard", "points", "fits in part"),
        *("normed first", "strided, points"),
    )
)
"""The long ones have what other models here have, too, or those of `drawn`."""


def drawn(draw: random.Random) -> nn.Module:
    """A chain of convolutions whose channels fit blocks, as the first one's do, or do not."""
    channels = draw.choice([16, 32])
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1), nn.Tanh()]
    for _ in range(3):
        wide, window = draw.choice([4, 8, 16, 20, 32]), (draw.randint(1, 3), draw.randint(1, 3))
        groups = draw.choice([1, 1, wide if wide % channels == 0 else 1])
        if groups > 1:
            groups, wide = channels, channels
        step, bias = (draw.randint(1, 2), 1), draw.random() < 0.5
        gaps = (draw.randint(1, 2), draw.randint(1, 2))
        edge = (gaps[0] * (window[0] // 2), gaps[1] * (window[1] // 2))
        layers.append(nn.Conv2d(channels, wide, window, step, edge, gaps, groups, bias))
        layers += draw.choice([[nn.BatchNorm2d(wide)], []])
        layers.append(draw.choice([nn.Tanh(), nn.SiLU(), nn.Softplus(), nn.AvgPool2d((1, 2), 1)]))
        channels = wide
    return nn.Sequential(*layers, *tail(channels))


@cache
def exported(name: str, seed: int) -> tuple[Case, bytes]:
    """The training step of a model with weights drawn by `seed`, and its plain graph."""
    torch.manual_seed(seed)
    build, shape, _ = MODELS[name]
    case = Case.of(build(), shape)
    return case, to_onnx(case.signature)


def treat_as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let full batches of small images, too, be computed in a way of their own."""
    monkeypatch.setattr(blocked_depthwise_gradient, "LEAST_BYTES", 0)
    monkeypatch.setattr(blocked_sums, "LEAST_BYTES", 0)


@pytest.mark.parametrize("name", NAMES)
def test_blocked_forms_by_definition(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    treat_as_large(monkeypatch)
    case, graph = exported(name, seed)
    signature = case.signature
    for block, halves in itertools.product(BLOCKS, (1, 2)):
        form = blocked(graph, block, halves * block)
        assert form is not None
        model = onnx.load_from_string(form)
        onnx.checker.check_model(model)
        assert sum(map(is_convolution, for_any_batch(model.graph))) >= MODELS[name][2]
        assert all(n.domain == DOMAIN for n in model.graph.node if n.op_type == "MaxPool")
        assert [v.name for v in model.graph.output] == [p.name for p in signature.outputs]
        for batch in (5, halves * block):
            check_by_definition(case, form, block, case.feeds(seed, batch))


@pytest.mark.parametrize("multiplies", [True, False], ids=["products", "selections"])
def test_both_ways_to_drop(multiplies: bool, seed: int, tmp_path: Path) -> None:
    """Which of the two an export takes depends on their memory."""
    case, graph = exported("dropped out", seed)
    for block in BLOCKS:
        way = partial(rewrite, block=block, batch=block, multiplies=multiplies)
        form = rewritten(graph, way)
        assert form is not None
        check_by_definition(case, form, block, case.feeds(seed, 5))
        if block == block_size():
            path = tmp_path / form_file("train.onnx", blocked_form(block))
            check_in_runtime(case, graph, form, path, seed)


@pytest.mark.parametrize(
    "name", half_quick(["residual", "strided", "few outputs", "narrow between"])
)
def test_kernels_in_strips(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of weights sum over strips of rows, as many as divide the rows of a kernel."""
    draw = random.Random(seed)
    monkeypatch.setattr(blocked_weight_gradient, "divisors", lambda n: [draw.choice(divisors(n))])
    (case, graph), block = exported(name, seed), draw.choice(BLOCKS)
    batch = draw.choice([1, 2]) * block
    form = blocked(graph, block, batch)
    assert form is not None
    for samples in (3, batch):
        check_by_definition(case, form, block, case.feeds(seed, samples))


@pytest.mark.parametrize(
    "name", some_long(["strided, whole steps", "strided, points"], "strided, points")
)
def test_strided_gradients_are_blocked(name: str, seed: int) -> None:
    _, graph = exported(name, seed)
    assert b"ConvTranspose" in graph
    form = blocked(graph, 8, 8)
    assert form is not None
    assert b"ConvTranspose" not in form


@pytest.mark.parametrize("number", some_long(range(4), 1, 2, 3))
def test_convolutions_of_any_sizes(number: int, seed: int) -> None:
    torch.manual_seed(seed + number)
    case = Case.of(drawn(random.Random(seed + number)), (3, 8, 9))
    graph, feeds = to_onnx(case.signature), case.feeds(seed, 5)
    for block in BLOCKS:
        form = blocked(graph, block, 2 * block)
        assert form is not None
        check_by_definition(case, form, block, feeds, close=1e-3)  # batch norms magnify rounding


def for_any_batch(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """The nodes that compute a batch that is not full."""
    others = [
        attribute.g
        for node in graph.node
        for attribute in node.attribute
        if attribute.name == "else_branch"
    ]
    return [node for attribute in (graph, *others) for node in attribute.node]


def is_convolution(node: onnx.NodeProto) -> bool:
    """Whether it is blocked, and no batch norm, which has one pixel and a group a channel."""
    attributes = {
        attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute
    }
    if node.op_type != "Conv" or node.domain != DOMAIN:
        return False
    return bool(attributes["group"] == 1 or attributes.get("kernel_shape") != [1, 1])


@pytest.mark.skipif(block_size() is None, reason="this ONNX Runtime has no blocked convolutions")
@pytest.mark.parametrize("made_for", ["two blocks", "the first batch"])
@pytest.mark.parametrize("name", NAMES)
def test_blocked_forms_in_the_runtime(
    name: str, made_for: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps in a row, with new state written over the old."""
    treat_as_large(monkeypatch)
    (case, graph), block = exported(name, seed), block_size() or 0
    form = blocked(graph, block, FIRST_BATCH if made_for == "the first batch" else 2 * block)
    assert form is not None
    check_in_runtime(
        case, graph, form, tmp_path / form_file("train.onnx", blocked_form(block)), seed
    )


def test_a_graph_without_a_fitting_convolution_has_no_blocked_form(seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 12, 3), nn.Tanh(), *tail(12))
    graph = to_onnx(train_step(model, (3, 6, 6), batch_size=4))
    assert [blocked(graph, block, 4) for block in BLOCKS] == [None, None]


def test_one_dimension_has_no_blocked_form(seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv1d(16, 32, 3), nn.Tanh(), nn.Flatten(), nn.Linear(128, 3))
    graph = to_onnx(train_step(model, (16, 6), batch_size=16))
    assert [blocked(graph, block, 16) for block in BLOCKS] == [None, None]


def test_the_memory_of_a_blocked_form(seed: int) -> None:
    """Reordered images and filters are counted, the patches of plain convolutions are not."""
    _, graph = exported("residual", seed)
    sized = SizedGraph(graph, 8)
    memory = sized.footprint(way_to_rewrite(sized, 16))
    names = {buffer.name for buffer in memory.alive}
    assert any(name.startswith("blocked_") for name in names)
    assert memory.process > 0


@pytest.mark.parametrize("again", [None, Recomputation(32)], ids=["once", "computed again"])
def test_the_blocked_form_of_an_input_is_not_kept_until_its_gradient(
    again: Recomputation | None, seed: int
) -> None:
    """The input is in memory anyway: forward and backward pass each bring it into blocks."""
    torch.manual_seed(seed)
    layers = [layer for _ in range(4) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.Tanh())]
    case = Case.of(nn.Sequential(*layers, *tail(16)), (16, 24, 24))
    signature = replace(case.signature, recompute=again)
    samples = next(port.name for port in signature.inputs if port.kind == "samples")
    graph = to_onnx(signature)
    assert (b"_repeated" in graph) == (again is not None)
    form = blocked(graph, 8, 32)
    assert form is not None
    order = execution_order(ir.from_proto(onnx.load_from_string(form)).graph)
    index = {node: number for number, node in enumerate(order)}
    end = next(index[node] for node in order if node.op_type == "LogSoftmax")
    reorders = [n for n in order if n.op_type == "ReorderInput" and n.inputs[0].name == samples]
    behind = [{index[use] > end for use in node.outputs[0].consumers()} for node in reorders]
    assert behind == [{False}, {True}]
    assert [index[node] > end for node in reorders] == [False, True]


def test_layers_share_what_fills_blocks_of_samples(seed: int) -> None:
    torch.manual_seed(seed)
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.Tanh())]
    form = blocked(to_onnx(Case.of(nn.Sequential(*layers, *tail(16)), (16, 6, 6)).signature), 8, 8)
    assert form is not None
    counts = Counter(node.op_type for node in onnx.load_from_string(form).graph.node)
    assert counts["Pad"] == 3
    assert counts["Mod"] == 2  # for the padding of images, and for the order of filters
