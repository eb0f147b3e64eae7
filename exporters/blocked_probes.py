"""The graphs by which a device finds out which blocked convolutions its runtime has.

They ship in `device_agent/runtime/blocked_probes`, one for each block. Run
`python -m exporters.blocked_probes` to write the files again.
"""

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, checker, helper

from device_agent.formats.blocked_graphs import BLOCKS
from device_agent.runtime.blocked_probe import FOLDER, SHAPES
from exporters.onnx.blocked_layout import blocked
from exporters.onnx.onnx_writer import IR_VERSION
from exporters.onnx.operator_table import OPSET

RESULTS = ("plain", "blocked")


def probe(block: int) -> bytes:
    """A graph with the outputs `plain` and `blocked`, equal in a runtime with this block."""
    plain, other = (model(name) for name in RESULTS)
    form = blocked(other.SerializeToString(deterministic=True), block)
    assert form is not None
    both = onnx.load_from_string(form)
    both.graph.node.extend(plain.graph.node)
    both.graph.output.insert(0, plain.graph.output[0])
    checker.check_model(both)
    return both.SerializeToString(deterministic=True)  # type: ignore[no-any-return]


def model(result: str) -> ModelProto:
    """Every kind of convolution that the blocked forms of training steps have, in a row."""
    made = helper.make_model(
        graph(result),
        ir_version=IR_VERSION,
        producer_name="edgetailor",
        opset_imports=[helper.make_opsetid("", OPSET)],
    )
    checker.check_model(made)
    return made


def graph(result: str) -> GraphProto:
    """The graph of `model`; the names of its values begin with `result`."""
    a, b, c, d, e, f, g = (f"{result}-{letter}" for letter in "abcdefg")
    nodes = [
        window("x few", a, 3),
        window(f"{a} dense bias", b, 3),
        helper.make_node("Add", [b, a], [c]),
        helper.make_node("Relu", [c], [d]),
        helper.make_node("Identity", [d], [e]),  # stays plain, so that the layout changes twice
        window(f"{e} depthwise", f, 3, group=SHAPES["depthwise"][0]),
        window(f"{f} point", g, 1, stride=2),
        helper.make_node("Identity", [g], [result]),
    ]
    given = [helper.make_tensor_value_info(k, TensorProto.FLOAT, s) for k, s in SHAPES.items()]
    found = helper.make_tensor_value_info(result, TensorProto.FLOAT, [None] * 4)
    return helper.make_graph(nodes, "probe", given, [found])


def window(inputs: str, output: str, kernel: int, stride: int = 1, group: int = 1) -> NodeProto:
    """A convolution with as much padding as keeps the size at stride 1."""
    return helper.make_node(
        "Conv",
        inputs.split(),
        [output],
        kernel_shape=[kernel] * 2,
        pads=[kernel // 2] * 4,
        strides=[stride] * 2,
        dilations=[1, 1],
        group=group,
    )


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for block in BLOCKS:
        (FOLDER / f"{block}.onnx").write_bytes(probe(block))
