"""Sums over pixels of blocked images, and batch norms, which need most of them."""

from dataclasses import replace
from functools import partial

import onnx
import onnx_ir as ir
import pytest
from torch import nn

from exporters.memory.static_shapes import at_batch
from exporters.onnx.forms.blocked_layout import DOMAIN, blocked, rewrite
from exporters.onnx.forms.blocked_sums import LEAST_BYTES
from exporters.onnx.graph_reading import is_all
from exporters.onnx.onnx_writer import to_onnx
from exporters.programs.program import Recomputation
from form_cases import Case, tail
from parameters import half_quick

BATCH, CHANNELS, WIDTH = 8, 16, 64
FULL = LEAST_BYTES // (4 * CHANNELS * WIDTH * WIDTH)
"""The smallest batch whose images are large."""


@pytest.fixture(scope="module")
def graph() -> bytes:
    """The training step of one layer with batch norm: two sums of products over pixels."""
    layers = [nn.Conv2d(3, CHANNELS, 3, padding=1, bias=False), nn.BatchNorm2d(CHANNELS), nn.Tanh()]
    return to_onnx(Case.of(nn.Sequential(*layers, *tail(CHANNELS)), (3, WIDTH, WIDTH)).signature)


def sums(nodes: list[ir.Node]) -> list[int]:
    """The numbers of channels of convolutions with one pixel as their result."""
    convolutions = [n for n in nodes if n.op_type == "Conv" and n.domain == DOMAIN]
    sized = [n for n in convolutions if "kernel_shape" in n.attributes]
    return [
        n.attributes["group"].as_int()
        for n in sized
        if list(n.attributes["kernel_shape"].as_ints()) == [WIDTH, WIDTH]
    ]


@pytest.mark.parametrize(("batch", "count"), [(FULL - 1, 0), (FULL, 2), (FULL + 3, 2)])
def test_only_large_images(graph: bytes, batch: int, count: int) -> None:
    form = blocked(graph, 8, batch)
    assert form is not None
    choices = [n for n in ir.from_proto(onnx.load_from_string(form)).graph if n.op_type == "If"]
    full = [list(node.attributes["then_branch"].as_graph()) for node in choices]
    assert [sums(nodes) for nodes in full] == [[batch * CHANNELS]] * count
    others = [list(node.attributes["else_branch"].as_graph()) for node in choices]
    assert [sums(nodes) for nodes in others] == [[]] * count


@pytest.mark.parametrize(("samples", "count"), [(FULL, 2), (FULL - 1, 0), (2 * FULL, 0)])
def test_a_known_batch_needs_no_choice(graph: bytes, samples: int, count: int) -> None:
    """As predictions of memory and time read it: what a form for FULL samples does with others."""
    model = at_batch(onnx.load_from_string(graph), samples)
    assert rewrite(model, 8, FULL)
    assert all(node.op_type != "If" for node in model.graph)
    assert sums(list(model.graph)) == [FULL * CHANNELS] * count


def test_the_mean_of_pooling_reads_blocks(graph: bytes) -> None:
    """AdaptiveAvgPool2d counts its axes from behind."""
    model = at_batch(onnx.load_from_string(graph), 4)
    assert rewrite(model, 8, 4)
    reduced = [n.inputs[0].shape.numpy() for n in model.graph if n.op_type.startswith("Reduce")]
    images = [shape for shape in reduced if len(shape) == 4]
    assert images
    assert all(shape[2:] == (1, 1) for shape in images)


@pytest.mark.parametrize(
    "again", half_quick([None, Recomputation(BATCH)]), ids=["once", "computed again"]
)
def test_a_mean_that_is_known_is_a_bias(again: Recomputation | None) -> None:
    """A batch norm's image that is made again has no pass of its own that subtracts the mean."""
    conv = partial(nn.Conv2d, 16, 16, 3, padding=1, bias=False)
    layers = [part for _ in range(3) for part in (conv(), nn.BatchNorm2d(16), nn.Tanh())]
    case = Case.of(nn.Sequential(*layers, *tail(16)), (16, 32, 32))
    data = to_onnx(replace(case.signature, recompute=again))
    made_for = at_batch(onnx.load_from_string(data), BATCH)
    assert rewrite(made_for, 8, BATCH)
    blocks = [n for n in made_for.graph if n.domain == DOMAIN and n.op_type == "Conv"]
    dense = {n.outputs[0]: n for n in blocks if n.attributes["group"].as_int() == 1}
    centred = [n for n in blocks if n.inputs[0] in dense and is_all(n.inputs[1], 1)]
    assert len(centred) == 3  # in the forward pass, where a mean needs the image first
    assert any(len(n.inputs) == 3 for n in dense.values()) == (again is not None)
