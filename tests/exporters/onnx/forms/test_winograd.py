"""Convolutions by Winograd's method give the numbers of PyTorch's float64 autograd."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from device_agent.formats.graph_forms import WINOGRAD, form_file
from device_agent.runtime.onnx_runtime import OnnxSession
from exporters.memory.onnx_footprint import SizedGraph
from exporters.onnx.forms.winograd import A, B, G, rewrite, winograd
from exporters.onnx.onnx_writer import to_onnx
from form_cases import Case, check, check_in_runtime, tail
from parameters import half_quick, some_long
from training_steps import train_step


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.second(torch.tanh(self.norm(self.first(x)))) + x)


def chain(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {
    # model, sample shape, convolutions and gradients of weights by the method
    "residual": (
        lambda: nn.Sequential(nn.Conv2d(3, 32, 3), Residual(32), *tail(32)),
        (3, 8, 8),
        4,
        2,
    ),
    "odd sizes": (
        lambda: chain(nn.Conv2d(3, 32, 1), nn.Conv2d(32, 40, 3, padding=1), *tail(40)),
        (3, 5, 7),
        2,
        1,
    ),
    "paddings": (
        lambda: chain(
            nn.Conv2d(3, 32, 1),
            nn.Conv2d(32, 32, 3),
            nn.Conv2d(32, 48, 3, padding=2),
            nn.Conv2d(48, 32, 3, padding=(0, 1), bias=False),
            *tail(32),
        ),
        (3, 8, 9),
        6,
        3,
    ),
    "few outputs": (
        lambda: chain(nn.Conv2d(3, 64, 1), nn.Conv2d(64, 32, 3, padding=1), *tail(32)),
        (3, 8, 9),
        2,
        1,
    ),
    "does not fit": (
        lambda: chain(
            nn.Conv2d(3, 32, 1),
            nn.Conv2d(32, 32, 3, 2, 1),
            nn.Conv2d(32, 32, 3, padding=2, dilation=2),
            nn.Conv2d(32, 32, 3, padding=1, groups=2),
            nn.Conv2d(32, 16, 3, padding=1),
            nn.Conv2d(16, 32, (3, 1)),
            *tail(32),
        ),
        (3, 11, 12),
        0,
        0,
    ),
}


def test_the_matrices_of_the_method(seed: int) -> None:
    """y = A^T [(G g G^T) * (B^T d B)] A is the correlation of d by g."""
    draw = np.random.default_rng(seed)
    d, g = draw.normal(size=(4, 4)), draw.normal(size=(3, 3))
    y = A.T @ ((G @ g @ G.T) * (B.T @ d @ B)) @ A
    expected = [[(d[i : i + 3, j : j + 3] * g).sum() for j in (0, 1)] for i in (0, 1)]
    np.testing.assert_allclose(y, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", half_quick(some_long(MODELS, "few outputs")))
def test_training_steps(name: str, seed: int, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    build, shape, convolutions, gradients = MODELS[name]
    case = Case.of(build(), shape)
    graph = to_onnx(case.signature)
    form = winograd(graph)
    if form is None:
        assert (convolutions, gradients) == (0, 0)
        return
    onnx.checker.check_model(onnx.load_from_string(form), full_check=True)
    assert replaced(graph, form) == convolutions + gradients
    check_in_runtime(case, graph, form, tmp_path / form_file("train.onnx", WINOGRAD), seed)


def replaced(graph: bytes, form: bytes) -> int:
    """How many convolutions of `graph` are not in its `form`."""
    counts = [
        sum(
            "Conv" in node.op_type and not node.output[0].startswith("winograd")
            for node in onnx.load_from_string(data).graph.node
        )
        for data in (graph, form)
    ]
    return counts[0] - counts[1]


def drawn(draw: random.Random) -> nn.Module:
    """A chain of convolutions. The second one fits, and perhaps later ones."""
    channels = draw.choice([32, 33, 64])
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 1), nn.Tanh()]
    layers += [nn.Conv2d(32, channels, 3, padding=draw.randint(0, 2)), nn.Tanh()]
    for _ in range(3):
        wide, window = draw.choice([16, 32, 33, 64]), draw.choice([1, 3, 3, 3])
        edge, step = draw.randint(0, window // 2 + 1), draw.choice([1, 1, 1, 2])
        layers.append(nn.Conv2d(channels, wide, window, step, edge, bias=draw.random() < 0.5))
        layers.append(draw.choice([nn.Tanh(), nn.SiLU(), nn.Softplus()]))
        channels = wide
    return nn.Sequential(*layers, *tail(channels))


@pytest.mark.parametrize("number", some_long(range(4), 1, 2, 3))
def test_convolutions_of_any_sizes(number: int, seed: int, tmp_path: Path) -> None:
    torch.manual_seed(seed + number)
    draw = random.Random(seed + number)
    # Four windows of 3 that skip every second pixel and have no edge need 31.
    case = Case.of(drawn(draw), (3, draw.randint(31, 36), draw.randint(31, 36)))
    graph, feeds = to_onnx(case.signature), case.feeds(seed, 5)
    form = winograd(graph)
    assert form is not None
    file = tmp_path / "train.winograd.onnx"
    file.write_bytes(form)
    given = {key: value.numpy() for key, value in feeds.items()}
    check(case.signature, OnnxSession(file, threads=1).run(given), feeds, close=1e-4)


def test_the_memory_is_that_of_the_form() -> None:
    """Transformed tiles are four times as large as their image."""
    first, *others = (nn.Conv2d(channels, 64, 3, padding=1) for channels in (3, 64, 64))
    layers = [first, *(layer for conv in others for layer in (nn.Tanh(), conv))]
    graph = SizedGraph(to_onnx(train_step(nn.Sequential(*layers, *tail(64)), (3, 8, 8))), 32)
    plain, other = graph.footprint(), graph.footprint(rewrite)
    # An image has 64 channels of 8 x 8 pixels; its tiles exist before and after a
    # transposition.
    tiles = 4 * 4 * 32 * 64 * 8 * 8
    assert tiles < other.process - plain.process < 4 * tiles
