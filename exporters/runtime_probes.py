"""Probes: graphs that show which forms a device's runtime supports, and how fast the forms are.

The files are in `device_agent/runtime/probes`: a probe for each block size of blocked convolutions,
and a training step in plain and in Winograd form. To write the files again, run `python -m
exporters.runtime_probes`.
"""

from pathlib import Path

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, checker, helper

from device_agent.formats.graph_forms import BLOCKS, WINOGRAD, blocked_form, form_file
from device_agent.runtime import winograd_probe
from device_agent.runtime.blocked_probe import FOLDER, SHAPES
from exporters.onnx.forms.blocked_layout import blocked
from exporters.onnx.forms.winograd import winograd
from exporters.onnx.graph_reading import CHANNELS_LAST, SWAP
from exporters.onnx.onnx_writer import IR_VERSION
from exporters.onnx.operator_table import OPSET

RESULTS = ("plain", "blocked")


def probe(block: int) -> bytes:
    """A graph with the outputs `plain` and `blocked`.

    If the blocks of the runtime's layout have the size `block`, the outputs are equal.
    """
    plain, other = (model(name) for name in RESULTS)
    form = blocked(other.SerializeToString(deterministic=True), block, SHAPES["x"][0])
    assert form is not None
    both = onnx.load_from_string(form)
    both.graph.node.extend(plain.graph.node)
    both.graph.output.insert(0, plain.graph.output[0])
    checker.check_model(both)
    return both.SerializeToString(deterministic=True)  # type: ignore[no-any-return]


def model(result: str) -> ModelProto:
    """A model that chains all kinds of operators that occur in blocked forms of training steps."""
    return checked(graph(result))


def checked(graph: GraphProto) -> ModelProto:
    """Return an ONNX model of `graph` after the checks of the onnx library."""
    model = helper.make_model(
        graph,
        ir_version=IR_VERSION,
        producer_name="edgetailor",
        opset_imports=[helper.make_opsetid("", OPSET)],
    )
    checker.check_model(model)
    return model


def graph(result: str) -> GraphProto:
    """The graph of `model`. The names of all values begin with `result`."""
    a, b, c, d, e, f, g, h = (f"{result}-{letter}" for letter in "abcdefgh")
    nodes = [
        window("x few", a, 3),
        window(f"{a} dense bias", b, 3),
        helper.make_node("Add", [b, a], [c]),
        helper.make_node("Relu", [c], [d]),
        helper.make_node("Identity", [d], [e]),  # stays plain, so that the layout changes twice
        window(f"{e} depthwise", f, 3, group=SHAPES["depthwise"][0]),
        window(f"{f} point", g, 1, stride=2),
        helper.make_node("MaxPool", [g], [h], kernel_shape=[2, 2]),
        helper.make_node("Identity", [h], [result]),
    ]
    given = [helper.make_tensor_value_info(k, TensorProto.FLOAT, s) for k, s in SHAPES.items()]
    output = helper.make_tensor_value_info(result, TensorProto.FLOAT, [None] * 4)
    return helper.make_graph(nodes, "probe", given, [output])


def window(inputs: str, output: str, kernel: int, stride: int = 1, group: int = 1) -> NodeProto:
    """A convolution whose padding keeps the size of the image at stride 1."""
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


def step() -> GraphProto:
    """Two convolutions and the gradients of their weights.

    Instead of a real gradient with respect to a convolution's result, the result is used.
    """
    nodes, results, shapes = [], [], winograd_probe.SHAPES
    for channels in (32, 64):
        image, weight, y, last, sizes, flat, kernel, d_weight = (
            f"{name}{channels}" for name in ("x", "w", "y", "last", "sizes", "flat", "kernel", "d")
        )
        batch, _, rows, columns = shapes[image]
        row_sizes = [1, batch, rows, columns * channels]
        row_shape = helper.make_tensor(sizes, TensorProto.INT64, [4], row_sizes)
        nodes += [
            window(f"{image} {weight}", y, 3),
            helper.make_node("Transpose", [image], [last], perm=CHANNELS_LAST),
            helper.make_node("Constant", [], [sizes], value=row_shape),
            helper.make_node("Reshape", [last, sizes], [flat]),
            helper.make_node("Transpose", [y], [kernel], perm=SWAP),
            helper.make_node(
                "Conv",
                [flat, kernel],
                [d_weight],
                kernel_shape=[rows, columns],
                pads=[1, channels, 1, channels],
                strides=[1, 1],
                dilations=[1, channels],
                group=1,
            ),
        ]
        for name, shape in ((y, shapes[image]), (d_weight, (1, channels, 3, 3 * channels))):
            results.append((f"{name}-result", shape))
            nodes.append(helper.make_node("Identity", [name], [f"{name}-result"]))
    given = [helper.make_tensor_value_info(k, TensorProto.FLOAT, s) for k, s in shapes.items()]
    outputs = [helper.make_tensor_value_info(k, TensorProto.FLOAT, s) for k, s in results]
    return helper.make_graph(nodes, "probe", given, outputs)


def write(folder: Path) -> None:
    """Write all probes to `folder`."""
    for block in BLOCKS:
        (folder / f"{blocked_form(block)}.onnx").write_bytes(probe(block))
    plain = folder / winograd_probe.PROBE.name
    plain.write_bytes(checked(step()).SerializeToString(deterministic=True))
    other = winograd(plain.read_bytes())
    assert other is not None
    plain.with_name(form_file(plain.name, WINOGRAD)).write_bytes(other)


if __name__ == "__main__":
    write(FOLDER)
