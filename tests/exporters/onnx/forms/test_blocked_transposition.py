"""Many small matrices are transposed by the operators that reorder blocks of channels."""

import math

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from exporters.onnx.forms import blocked_transposition
from exporters.onnx.forms.blocked_layout import blocked
from exporters.onnx.forms.blocked_transposition import matrices_of
from exporters.onnx.onnx_writer import to_onnx
from form_cases import Case, tail

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@given(SIZES.flatmap(lambda sizes: st.tuples(st.just(sizes), st.permutations(range(len(sizes))))))
def test_what_is_a_transposition_of_matrices(given_axes: tuple[list[int], list[int]]) -> None:
    sizes, axes = given_axes
    x = np.arange(math.prod(sizes)).reshape(sizes)
    right, shape = x.transpose(axes).reshape(-1), matrices_of(sizes, axes)
    if shape is not None:
        assert shape[1] > 1
        assert shape[2] > 1
        np.testing.assert_array_equal(x.reshape(shape).swapaxes(1, 2).reshape(-1), right)
    else:  # nothing moves, or no way to cut the axes into three parts gives this order
        cuts = [(a, b) for b in range(len(sizes)) for a in range(b)]
        shapes = [[math.prod(part) for part in (sizes[:a], sizes[a:b], sizes[b:])] for a, b in cuts]
        swapped = [x.reshape(s).swapaxes(1, 2).reshape(-1) for s in shapes]
        moved = not np.array_equal(right, x.reshape(-1))
        assert not moved or not any(np.array_equal(numbers, right) for numbers in swapped)


def test_the_gradient_of_a_weight_is_brought_into_its_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many matrices as the layer has outputs, each of 3 x 3 pixels and 16 channels."""
    layers = [nn.Conv2d(3, 16, 3), nn.Tanh(), nn.Conv2d(16, 16, 3), nn.Tanh()]
    graph = to_onnx(Case.of(nn.Sequential(*layers, *tail(16)), (3, 9, 9)).signature)
    counts = []
    for least in (16, 17):
        monkeypatch.setattr(blocked_transposition, "LEAST_MATRICES", least)
        form = blocked(graph, 8, 16)
        assert form is not None
        nodes = onnx.load_from_string(form).graph.node
        counts.append(sum(node.op_type == "Transpose" for node in nodes))
    assert counts[0] == counts[1] - 1
