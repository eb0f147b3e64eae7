"""The graphs that a device runs to calibrate itself.

The files are in `device_agent/profiling/calibration_graphs`. Each graph contains operators of
training steps. Its sizes are symbolic, and the agent chooses them. The name of a node is the kind
of its work (see `profiles/cost_model/workload.py`), followed by a number if the kind occurs several
times. Run `python -m exporters.calibration_graphs` to write the files again.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from onnx import NodeProto, TensorProto, helper

import device_agent
from device_agent.profiling.calibration_cases import CHANNELS
from exporters.onnx.graph_reading import DOMAIN
from exporters.onnx.onnx_writer import IR_VERSION
from exporters.onnx.operator_table import OPSET

FOLDER = Path(device_agent.__file__).with_name("profiling") / "calibration_graphs"
PASSED_ON = 64
"""Number of small nodes in the graphs that measure the cost of one more node."""


def graph(
    name: str,
    nodes: Sequence[NodeProto],
    inputs: Mapping[str, int],
    outputs: Mapping[str, int],
    constants: Mapping[str, Sequence[int] | float] | None = None,
) -> bytes:
    """Build a graph and return it as a serialized ONNX model.

    `inputs` and `outputs` map the name of each float32 tensor to its number of axes. A constant is
    a list of int64 numbers or one float32 number.
    """
    numbers = [
        helper.make_tensor(key, TensorProto.FLOAT, [], [value])
        if isinstance(value, float)
        else helper.make_tensor(key, TensorProto.INT64, [len(value)], list(value))
        for key, value in (constants or {}).items()
    ]
    content = helper.make_graph(
        list(nodes),
        name,
        [tensor(key, count) for key, count in inputs.items()],
        [tensor(key, count) for key, count in outputs.items()],
        numbers,
    )
    model = helper.make_model(
        content,
        ir_version=IR_VERSION,
        producer_name="edgetailor",
        opset_imports=[helper.make_opsetid("", OPSET)],
    )
    if any(node.domain for node in nodes):
        model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    onnx.checker.check_model(model)
    return model.SerializeToString(deterministic=True)  # type: ignore[no-any-return]


def tensor(name: str, axes: int) -> onnx.ValueInfoProto:
    """Describe a float32 tensor with symbolic sizes."""
    sizes = [f"{name}_{axis}" for axis in range(axes)]
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes)


def node(kind: str, operator: str, inputs: str, output: str, **attributes: Any) -> NodeProto:
    """One node; `inputs` are names separated by spaces."""
    return helper.make_node(operator, inputs.split(), [output], name=kind, **attributes)


def single(kind: str, operator: str, axes: int, **attributes: Any) -> bytes:
    """A graph of one operator on the inputs `x` and `w`."""
    return graph(
        kind, [node(kind, operator, "x w", "y", **attributes)], {"x": axes, "w": axes}, {"y": axes}
    )


def blocked(kind: str, groups: int = 1) -> bytes:
    """A convolution in the runtime's blocked layout.

    Its inputs are not brought into the layout, because the order of values does not change the
    time. The kind `scaled` also adds the image `s`, as most of these convolutions do in training
    steps.
    """
    inputs = dict.fromkeys(("x", "w", "s") if kind == "scaled" else "xw", 4)
    given = ["x", "w", "", "s"] if kind == "scaled" else ["x", "w"]
    convolution = helper.make_node("Conv", given, ["y"], name=kind, domain=DOMAIN, group=groups)
    return graph(kind, [convolution], inputs, {"y": 4})


def gradient() -> bytes:
    """A graph of one matrix product.

    The product is the gradient of a dense layer's weights. The graph adds the momentum, multiplied
    by 0.9.
    """
    product = node("accumulated", "Gemm", "x w c", "y", transA=1, beta=0.9)
    return graph("accumulated", [product], {"x": 2, "w": 2, "c": 2}, {"y": 2})


def pointwise() -> bytes:
    """All elementwise operators, on inputs of one axis.

    As in a backward pass, most operators with two operands read one operand that was just computed
    and one older operand.
    """
    return graph(
        "pointwise",
        [
            node("arithmetic", "Add", "x w", "a"),
            node("scaling", "Mul", "a half", "b"),
            node("unary", "Relu", "b", "c"),
            node("arithmetic-2", "Mul", "c u", "d"),
            node("unary-2", "Neg", "a", "e"),
            node("root", "Sqrt", "d", "f"),
            node("division", "Div", "f w", "g"),
            node("power", "Pow", "g two", "h"),
            node("exponential", "Exp", "h", "i"),
            node("exponential-2", "Log", "i", "j"),
            node("sigmoid", "Tanh", "j", "k"),
            node("sigmoid-2", "Sigmoid", "k", "l"),
            node("comparison", "Greater", "l half", "m"),
            node("selection", "Where", "m l u", "n"),
            node("unary-3", "Cast", "m", "o", to=TensorProto.FLOAT),
            node("arithmetic-3", "Sub", "o v", "p"),
            node("extreme", "Max", "p n", "q"),
            node("arithmetic-4", "Add", "q e", "r"),
            node("reduction", "ReduceSum", "r", "y", keepdims=0),
        ],
        dict.fromkeys("xwuv", 1),
        {"y": 0},
        {"half": 0.5, "two": 2.0},
    )


def images() -> bytes:
    """Operators that scale, reduce or move images `x` and `w` (N, C, H, W); `p` is (1, C, 1, 1)."""
    return graph(
        "images",
        [
            node("shape-2", "Shape", "x", "sizes"),
            node("broadcast", "Mul", "x p", "a"),
            node("broadcast-2", "Sub", "w p", "b"),
            node("shape", "Reshape", "p flat", "v"),
            node("normalisation", "BatchNormalization", "w v v v v", "c"),
            node("transposition-outer", "Transpose", "c", "d", perm=[1, 0, 2, 3]),
            node("transposition-outer-2", "Transpose", "d", "e", perm=[1, 0, 2, 3]),
            node("transposition", "Transpose", "e", "f", perm=[0, 2, 3, 1]),
            node("transposition-2", "Transpose", "f", "g", perm=[0, 3, 1, 2]),
            node("padding", "Pad", "g around", "h"),
            node("cutting", "Slice", "h from to axes", "i"),
            node("arithmetic-3", "Add", "a b", "z"),
            node("joining", "Concat", "i z", "j", axis=1),
            node("reduction", "ReduceSum", "j channels", "k", keepdims=0),
            node("reduction-2", "ReduceMean", "i pixels", "l", keepdims=1),
            node("expansion", "Expand", "l sizes", "m"),
            node("arithmetic", "Add", "m i", "n"),
            node("reduction-3", "ReduceSum", "n", "o", keepdims=0),
            node("reduction-4", "ReduceSum", "n first", "q", keepdims=0),
            node("broadcast-3", "Add", "q o", "r"),
            node("reduction-5", "ReduceSum", "r", "s", keepdims=0),
            node("reduction-6", "ReduceSum", "k", "t", keepdims=0),
            node("arithmetic-2", "Add", "s t", "y"),
        ],
        {"x": 4, "w": 4, "p": 4},
        {"y": 0},
        {
            "flat": [-1],
            "around": [0, 0, 1, 1, 0, 0, 1, 1],
            "from": [1, 1],
            "to": [-1, -1],
            "axes": [2, 3],
            "channels": [0, 2, 3],
            "pixels": [2, 3],
            "first": [0],
        },
    )


def passed_on() -> bytes:
    """A chain of `PASSED_ON` small nodes: each reads the result of the previous node."""
    row = [node(f"unary-{n}", "Neg", f"v{n}", f"v{n + 1}") for n in range(PASSED_ON)]
    row[0].input[0], row[-1].output[0] = "x", "y"
    return graph("row", row, {"x": 1}, {"y": 1})


def passed_through() -> bytes:
    """`PASSED_ON` independent small nodes, each with its own graph input and output."""
    side = [node(f"unary-{n}", "Neg", f"x{n}", f"y{n}") for n in range(PASSED_ON)]
    inputs, outputs = ({f"{end}{n}": 1 for n in range(PASSED_ON)} for end in "xy")
    return graph("side", side, inputs, outputs)


def scan() -> bytes:
    """A loop over time with two small nodes per step."""
    vector = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n"]) for n in ("s", "x_t")]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n"]) for n in ("s_next", "y_t")]
    body = helper.make_graph(
        [node("a", "Add", "s x_t", "s_next"), node("b", "Neg", "s_next", "y_t")],
        "step",
        vector,
        ends,
    )
    loop = helper.make_node(
        "Scan", ["s0", "x"], ["last", "y"], name="loop", body=body, num_scan_inputs=1
    )
    return graph("loop", [loop], {"s0": 1, "x": 2}, {"y": 2})


def graphs() -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of each graph."""
    yield "convolution", single("convolution", "Conv", 4)
    yield "convolution_strided", single("convolution", "Conv", 4, strides=[2, 2])
    for dilation in (8, 32, 128):
        dilations = [1, dilation]
        yield (
            f"convolution_dilated_{dilation}",
            single("convolution", "Conv", 4, dilations=dilations),
        )
    yield "blocked", blocked("blocked")
    yield "blocked_depthwise", blocked("blocked", CHANNELS)
    yield "scaled", blocked("scaled", CHANNELS)
    yield "transposed", single("transposed", "ConvTranspose", 4)
    yield "transposed_strided", single("transposed", "ConvTranspose", 4, strides=[2, 2])
    yield "product", single("product", "MatMul", 3)
    yield "gemm_rows", single("product", "Gemm", 2, transB=1)
    yield "gradient", gradient()
    yield "pointwise", pointwise()
    yield "images", images()
    yield "row", passed_on()
    yield "side", passed_through()
    yield "loop", scan()


if __name__ == "__main__":
    for name, content in graphs():
        (FOLDER / f"{name}.onnx").write_bytes(content)
