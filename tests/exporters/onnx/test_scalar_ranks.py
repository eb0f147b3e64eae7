"""Numbers in graphs get the rank of the tensors beside them; no value changes."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx import parser
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import nn

from edgetailor import TrainingConfig, split
from exporters.onnx.onnx_writer import to_onnx
from exporters.onnx.scalar_ranks import BROADCASTING, raise_numbers

GRAPH = """
<ir_version: 10, opset_import: ["": 18]>
numbers (float[N, 4, 3, 1] x, float rate, float[2] row)
=> (float[N, 4, 3, 1] y, float[2] z, float loss)
<float half = {0.5}, float[1] three = {3.0}> {
    step = Neg (rate)
    scaled = Mul (step, x)
    shifted = Add (half, scaled)
    near = Less (shifted, three)
    y = Where (near, shifted, half)
    z = Div (row, rate)
    twice = Mul (rate, three)
    loss = Squeeze (twice)
}
"""
LOOP = """
<ir_version: 10, opset_import: ["": 18]>
loop (float[1, 2, 3] start, float[T, 1, 2, 3] x, float rate)
=> (float[1, 2, 3] last, float[T, 1, 2, 3] y) {
    last, y = Scan <num_scan_inputs = 1, body = step (float[1, 2, 3] h, float[1, 2, 3] v)
        => (float[1, 2, 3] new, float[1, 2, 3] out) <float half = {0.5}> {
        less = Mul (h, half)
        slow = Mul (v, rate)
        new = Add (less, slow)
        out = Identity (new)
    }> (start, x)
}
"""


def changed(text: str) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    before = onnx.shape_inference.infer_shapes(parser.parse_model(text))
    model = ir.from_proto(before)
    raise_numbers(model.graph)
    RemoveUnusedNodesPass()(model)
    after = ir.to_proto(model)
    onnx.checker.check_model(after, full_check=True)
    return before, after


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session.run(None, feeds)  # type: ignore[no-any-return]


def unlike_ranks(model: ir.Model) -> list[str]:
    """Elementwise operators of the main graph that read operands of several ranks."""
    return [
        node.op_type
        for node in model.graph
        if node.op_type in BROADCASTING
        and len({len(value.shape) for value in node.inputs if value.shape is not None}) > 1
    ]


def test_values_stay(seed: int) -> None:
    draw = np.random.default_rng(seed)
    feeds = {
        "x": draw.standard_normal((2, 4, 3, 1), np.float32),
        "rate": np.array(0.3, np.float32),
        "row": draw.standard_normal(2, np.float32),
    }
    before, after = changed(GRAPH)
    assert unlike_ranks(ir.from_proto(before)) != []
    for ours, theirs in zip(run(after, feeds), run(before, feeds), strict=True):
        np.testing.assert_array_equal(ours, theirs, strict=True)
    ranks = {v.name: len(v.type.tensor_type.shape.dim) for v in after.graph.value_info}
    ranks |= {v.name: len(v.dims) for v in after.graph.initializer}
    ranks |= {v.name: len(v.type.tensor_type.shape.dim) for v in after.graph.input}
    ranks |= {n.output[0]: len(n.attribute[0].t.dims) for n in after.graph.node if n.attribute}
    reads = {n.output[0]: [ranks[name] for name in n.input] for n in after.graph.node}
    assert [reads[name] for name in ("scaled", "shifted", "near")] == [[4, 4]] * 3
    assert reads["y"] == [4, 4, 4]
    assert reads["z"] == [1, 0]  # one axis is one row already


def test_loops(seed: int) -> None:
    draw = np.random.default_rng(seed)
    feeds = {
        "start": draw.standard_normal((1, 2, 3), np.float32),
        "x": draw.standard_normal((5, 1, 2, 3), np.float32),
        "rate": np.array(0.3, np.float32),
    }
    before, after = changed(LOOP)
    for ours, theirs in zip(run(after, feeds), run(before, feeds), strict=True):
        np.testing.assert_array_equal(ours, theirs, strict=True)
    body = next(a.g for n in after.graph.node for a in n.attribute if a.name == "body")
    assert [list(c.dims) for c in body.initializer if c.name.endswith("_rank_3")] == [[1, 1, 1]]


def test_training_steps_have_no_other_numbers() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, (3, 1)), nn.Hardswish(), nn.Flatten(), nn.Linear(36, 2))
    training = TrainingConfig(batch_size=4, momentum=0.9, weight_decay=0.01)
    for signature in split(model, "full", (1, 6, 3), training).program.signatures:
        graph = onnx.shape_inference.infer_shapes(onnx.load_from_string(to_onnx(signature)))
        numbers = ir.from_proto(graph)
        wrong = [
            (node.op_type, value.name)
            for node in numbers.graph
            if node.op_type in BROADCASTING
            for value in node.inputs
            if value.shape is not None
            and len(value.shape) == 0
            and len(node.outputs[0].shape or ()) > 1
        ]
        assert wrong == [], signature.name


def test_the_runtime_computes_a_gelu_as_one_operator(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 2))
    program = split(model, "full", (4, 6), TrainingConfig()).program
    for signature in (s for s in program.signatures if s.name in ("train", "predict")):
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / signature.name)
        onnxruntime.InferenceSession(to_onnx(signature), options)
        nodes = onnx.load(tmp_path / signature.name).graph.node
        assert "Gelu" in [node.op_type.removeprefix("Bias") for node in nodes], signature.name
