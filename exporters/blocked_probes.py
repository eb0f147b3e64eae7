"""The graphs by which a device finds out which blocked convolutions its runtime has.

They ship in `device_agent/runtime/blocked_probes`, one for each block. Run
`python -m exporters.blocked_probes` to write the files again.
"""

from typing import Any

from onnx import TensorProto, checker, helper

from device_agent.formats.blocked_graphs import BLOCKS
from device_agent.runtime.blocked_probe import FOLDER, SHAPES
from exporters.onnx.blocked_layout import blocked
from exporters.onnx.onnx_writer import IR_VERSION
from exporters.onnx.operator_table import OPSET

WINDOW: dict[str, Any] = {
    "kernel_shape": [3, 3],
    "pads": [1] * 4,
    "strides": [1, 1],
    "dilations": [1, 1],
    "group": 1,
}


def probe(block: int) -> bytes:
    """A graph with the outputs `plain` and `blocked`, equal in a runtime with this block."""
    batch, _, *pixels = SHAPES["x"]
    shapes = {**SHAPES, "y": (batch, SHAPES["weight"][0], *pixels)}
    values = {
        name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shapes.get(name, shapes["y"]))
        for name in ("x", "weight", "plain", "blocked")
    }
    nodes = [
        # The convolution that is an output itself stays plain.
        *(helper.make_node("Conv", ["x", "weight"], [name], **WINDOW) for name in ("plain", "y")),
        helper.make_node("Identity", ["y"], ["blocked"]),
    ]
    given, results = [values["x"], values["weight"]], [values["plain"], values["blocked"]]
    model = helper.make_model(
        helper.make_graph(nodes, "probe", given, results),
        ir_version=IR_VERSION,
        producer_name="edgetailor",
        opset_imports=[helper.make_opsetid("", OPSET)],
    )
    checker.check_model(model)
    found = blocked(model.SerializeToString(deterministic=True), block)
    assert found is not None
    return found


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for block in BLOCKS:
        (FOLDER / f"{block}.onnx").write_bytes(probe(block))
