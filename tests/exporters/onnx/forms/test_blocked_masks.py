"""Masks of blocked images, as hard sigmoids, are those of a comparison."""

import math
from collections import Counter
from functools import cache, partial

import numpy as np
import onnx
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from onnx import helper
from torch import Tensor, nn

from device_agent.formats.graph_forms import BLOCKS
from device_agent.runtime.onnx_runtime import open_model
from edgetailor import TrainingConfig, split
from exporters.memory.onnx_footprint import SizedGraph
from exporters.onnx.forms.blocked_elements import LEAST_LIMIT, steep_line
from exporters.onnx.forms.blocked_layout import blocked, rewrite, way_to_rewrite
from exporters.onnx.onnx_writer import to_onnx
from form_cases import Case, tail
from onnx_graphs import model, value
from parameters import half_quick, some_long

NUMBERS = st.floats(width=32, allow_nan=False, allow_subnormal=False)
LIMITS = st.floats(width=32, allow_nan=False, allow_infinity=False).filter(
    lambda limit: limit == 0 or abs(limit) >= LEAST_LIMIT
)


def hard_sigmoid(x: np.ndarray, alpha: float, beta: float) -> np.ndarray:
    """What ONNX Runtime makes of `x` (3, 2)."""
    node = helper.make_node("HardSigmoid", ["x"], ["y"], alpha=alpha, beta=beta)
    graph = model([node], [value("x", x.shape)], [value("y", x.shape)])
    return np.asarray(open_model(graph.SerializeToString(), 1).run(None, {"x": x})[0])


@given(limit=LIMITS, others=st.lists(NUMBERS, min_size=3, max_size=3))
@example(limit=0.0, others=[0.0, -0.0, 2.0**-126])
@example(limit=3.0, others=[math.inf, -math.inf, -3.0])
@example(limit=float(np.finfo(np.float32).max), others=[0.0, math.inf, 1.0])
@example(limit=LEAST_LIMIT, others=[0.0, -LEAST_LIMIT, 1.0])
def test_masks_are_exact(limit: float, others: list[float]) -> None:
    """Beside the limit, too: at itself and at the numbers before and after it."""
    with np.errstate(over="ignore"):  # infinity follows the largest number
        near = np.nextafter(np.float32(limit), np.array([-np.inf, np.inf], np.float32))
    if limit == 0:  # neighbours that are not subnormal
        near = np.array([-1, 1], np.float32) * np.finfo(np.float32).tiny
    x = np.array([others, [limit, *near]], np.float32)
    line = steep_line(limit)
    assert line is not None
    for sign, expected in ((1, x > limit), (-1, x < limit)):
        mask = hard_sigmoid(x, sign * line[0], sign * line[1])
        np.testing.assert_array_equal(mask, expected.astype(np.float32))


@pytest.mark.parametrize("limit", [LEAST_LIMIT / 2, -math.inf, math.nan])
def test_limits_without_a_steep_line(limit: float) -> None:
    assert steep_line(limit) is None


@pytest.mark.parametrize("activation", half_quick([nn.ReLU, nn.Hardswish]))
def test_blocked_steps_do_not_compare(activation: type[nn.Module]) -> None:
    layers = [nn.Conv2d(3, 16, 3), activation(), nn.Conv2d(16, 16, 3), activation()]
    graph = to_onnx(Case.of(nn.Sequential(*layers, *tail(16)), (3, 8, 8)).signature)
    form = blocked(graph, 8, 8)
    assert form is not None
    before, after = (
        Counter(node.op_type for node in onnx.load_from_string(data).graph.node)
        for data in (graph, form)
    )
    assert before["Greater"] + before["Less"] == 2
    assert after["Greater"] == after["Less"] == 0
    assert after["HardSigmoid"] == before["HardSigmoid"] + 2


class Limited(nn.Module):
    """A selection that hides exponentials too large for a float."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x < 80, x.exp(), 0.0)


@pytest.mark.parametrize(("layer", "selects"), [(nn.Dropout(0.3), False), (Limited(), True)])
def test_only_a_dropout_multiplies_instead_of_selecting(layer: nn.Module, selects: bool) -> None:
    """What a dropout leaves out is finite."""
    layers = [nn.Conv2d(3, 16, 3), nn.Tanh(), layer, nn.Conv2d(16, 16, 3), nn.Tanh()]
    graph = to_onnx(Case.of(nn.Sequential(*layers, *tail(16)), (3, 8, 8)).signature)
    form = blocked(graph, 8, 8)
    assert form is not None
    before, after = (
        sum(node.op_type == "Where" for node in onnx.load_from_string(data).graph.node)
        for data in (graph, form)
    )
    assert before == 2
    assert after == (2 if selects else 0)


@cache
def with_dropouts(spec: str) -> SizedGraph:
    """A training step with three dropouts."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3)]
    for _ in range(3):
        layers += [nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.3), nn.Conv2d(16, 16, 3)]
    training = TrainingConfig(batch_size=32)
    program = split(nn.Sequential(*layers, *tail(16)), spec, (3, 16, 16), training).program
    return SizedGraph(to_onnx(program.signatures[0]), 32)


@pytest.mark.parametrize(
    "spec", some_long(["full,recompute=no", "full,recompute=yes"], "full,recompute=yes")
)
@pytest.mark.parametrize("block", BLOCKS)
def test_dropouts_take_the_form_that_needs_less_memory(spec: str, block: int) -> None:
    """Which one that is depends on the gaps between all other buffers."""
    sized = with_dropouts(spec)
    arenas = [
        sized.footprint(partial(rewrite, block=block, batch=32, multiplies=way)).arena
        for way in (True, False)
    ]
    assert sized.footprint(way_to_rewrite(sized, block)).arena == min(arenas)
