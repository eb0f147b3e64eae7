"""Masks of numbers beyond a limit are the same as those of a comparison, in fewer operators."""

import math
from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import nn

from device_agent.runtime.onnx_runtime import open_model
from edgetailor import split
from exporters.onnx.number_masks import LEAST_LIMIT, mask_in_one_pass
from exporters.onnx.onnx_writer import to_onnx

NUMBERS = st.floats(width=32, allow_nan=False, allow_subnormal=False)
LIMITS = st.floats(width=32, allow_nan=False, allow_infinity=False).filter(
    lambda limit: limit == 0 or abs(limit) >= LEAST_LIMIT
)


def changed(
    limit: list[float], comparison: str = "Greater", to: int = TensorProto.FLOAT
) -> onnx.ModelProto:
    """The mask of a tensor (N, 3), after the pass."""
    shape = [] if len(limit) == 1 else [len(limit)]
    graph = helper.make_graph(
        [
            helper.make_node(comparison, ["x", "limit"], ["beyond"]),
            helper.make_node("Cast", ["beyond"], ["y"], to=to),
        ],
        "masks",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3])],
        [helper.make_tensor_value_info("y", to, ["N", 3])],
        [helper.make_tensor("limit", TensorProto.FLOAT, shape, limit)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    inferred = ir.from_proto(onnx.shape_inference.infer_shapes(model))
    mask_in_one_pass(inferred.graph)
    RemoveUnusedNodesPass()(inferred)
    after = ir.to_proto(inferred)
    onnx.checker.check_model(after, full_check=True)
    return after


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node if node.op_type != "Constant"]


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
    for comparison, expected in (("Greater", x > limit), ("Less", x < limit)):
        model = changed([limit], comparison)
        assert operators(model) == ["HardSigmoid"]
        (found,) = open_model(model.SerializeToString(), 1).run(None, {"x": x})
        np.testing.assert_array_equal(found, expected.astype(np.float32), err_msg=comparison)


@pytest.mark.parametrize("limit", [0.0, 3.0])
def test_masks_are_exact_in_openvino(limit: float) -> None:
    openvino = pytest.importorskip("openvino", reason="needs the extra [openvino]")
    x = np.array([[0.0, -0.0, 1e-30], [-1e-30, limit, -limit], [1e38, -1e38, 2.9]], np.float32)
    for comparison, expected in (("Greater", x > limit), ("Less", x < limit)):
        graph = changed([limit], comparison).SerializeToString()
        found = openvino.compile_model(openvino.Core().read_model(graph), "CPU")([x])[0]
        np.testing.assert_array_equal(found, expected.astype(np.float32), err_msg=comparison)


def test_other_comparisons_stay() -> None:
    assert operators(changed([LEAST_LIMIT / 2])) == ["Greater", "Cast"]
    assert operators(changed([math.inf])) == ["Greater", "Cast"]
    assert operators(changed([0.0, 0.0, 1.0])) == ["Greater", "Cast"]
    assert operators(changed([0.0], "GreaterOrEqual")) == ["GreaterOrEqual", "Cast"]
    assert operators(changed([0.0], to=TensorProto.INT64)) == ["Greater", "Cast"]


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Hardswish])
def test_training_steps_do_not_compare(activation: type[nn.Module]) -> None:
    layers = [nn.Conv2d(1, 16, 3), activation(), nn.Conv2d(16, 16, 3), activation(), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(16 * 4 * 4, 3))
    graph = onnx.load_from_string(to_onnx(split(model, "full", (1, 8, 8)).program.signatures[0]))
    found = Counter(operators(graph))
    assert found["HardSigmoid"] >= 2
    assert found["Greater"] == found["Less"] == 0
