"""What an exported graph says of itself beyond its operators."""

import onnx
import torch
from onnx import shape_inference

import edgetailor
from exporters.memory.liveness import IN_PLACE
from exporters.onnx.onnx_writer import to_onnx
from foreign_models import FOREIGN


def test_shapes_are_known_wherever_an_operator_may_write_over_its_input() -> None:
    """ONNX Runtime takes other memory where its inference gives a size a name of its own."""
    torch.manual_seed(0)
    foreign = FOREIGN["stock-transformer"]
    model = foreign.build()
    model.encoder.layers = model.encoder.layers[:1]
    submodel = edgetailor.split(
        model, "full", foreign.shape, edgetailor.TrainingConfig(batch_size=4)
    )
    (train,) = (s for s in submodel.program.signatures if s.name == "train")
    graph = shape_inference.infer_shapes(onnx.load_from_string(to_onnx(train))).graph
    shapes = {
        value.name: [size.dim_value or size.dim_param for size in value.type.tensor_type.shape.dim]
        for value in (*graph.value_info, *graph.input, *graph.output)
    }
    pairs = [
        (shapes[node.input[0]], shapes[node.output[0]])
        for node in graph.node
        if node.op_type in IN_PLACE - {"Cast"}
    ]
    assert len(pairs) >= 2  # a softmax and a ReLU
    for source, result in pairs:
        assert source == result
        assert not any(str(size).startswith("unk") for size in source)
