"""Masks of zeros and ones in one operator: right for every number beside the threshold."""

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from onnx import parser
from onnx_ir.passes.common import RemoveUnusedNodesPass

from exporters.onnx.float_masks import compute_masks_at_once

LEAST = float(np.finfo(np.float32).tiny)
"""The smallest normal number."""
GRAPH = """
<ir_version: 10, opset_import: ["": 18]>
masks (float[N] x) => (float[N] more, float[N] less) <float c = {%r}> {
    above = Greater (x, c)
    more = Cast <to = 1> (above)
    below = Less (x, c)
    less = Cast <to = 1> (below)
}
"""
STAYS = {
    "whole numbers": "(int64[N] x) => (float[N] y) <int64 c = {2}>",
    "computed threshold": "(float[N] x, float c) => (float[N] y)",
    "one threshold for each": "(float[2] x) => (float[2] y) <float[2] c = {1.0, 2.0}>",
}


def masked(text: str) -> tuple[onnx.ModelProto, Counter[str]]:
    """The graph with masks at once, and its operators."""
    model = ir.from_proto(onnx.shape_inference.infer_shapes(parser.parse_model(text)))
    compute_masks_at_once(model.graph)
    RemoveUnusedNodesPass()(model)
    after = ir.to_proto(model)
    onnx.checker.check_model(after, full_check=True)
    return after, Counter(node.op_type for node in after.graph.node)


def normal(bits: int) -> float:
    """The float32 with these bits; numbers too small to be normal become 0."""
    number = np.uint32(bits).view(np.float32)
    return 0.0 if abs(number) < LEAST else float(number)


NUMBERS = st.integers(0, 2**32 - 1).map(normal).filter(np.isfinite)


@given(threshold=NUMBERS, others=st.lists(NUMBERS, max_size=5))
@example(threshold=0.0, others=[LEAST, -LEAST])
@example(threshold=3.0, others=[])
@example(threshold=1.0, others=[])  # the numbers below are closer together than those above
@example(threshold=-1.0, others=[])
def test_masks_are_exact(threshold: float, others: list[float]) -> None:
    model, operators = masked(GRAPH % threshold)
    c = np.float32(threshold)
    with np.errstate(over="ignore"):
        beside = [np.nextafter(c, np.float32(end)) for end in (-np.inf, np.inf)]
    x = np.array([c, *beside, *others, 0, 1, -1, np.inf, -np.inf], np.float32)
    x = x[(np.abs(x) >= LEAST) | (x == 0)]
    session = onnxruntime.InferenceSession(model.SerializeToString())
    more, less = session.run(None, {"x": x})
    np.testing.assert_array_equal(more, x > c)
    np.testing.assert_array_equal(less, x < c)
    if threshold == 0 or abs(threshold) > 1e-20:
        assert operators == {"HardSigmoid": 2}


@pytest.mark.parametrize("given", STAYS.values(), ids=STAYS)
def test_other_comparisons_stay(given: str) -> None:
    body = "{\n above = Greater (x, c)\n y = Cast <to = 1> (above)\n}"
    _, operators = masked(f'<ir_version: 10, opset_import: ["": 18]> masks {given} {body}')
    assert operators == {"Greater": 1, "Cast": 1}
