"""The graphs with which the web page for joining measures a browser: operations and a probe.

Browsers have no profiler for single operations. So the page times a graph with one operation, and a
graph without the operation but with the same inputs. The difference is the operation's time. Every
graph outputs only the shape of its result, so that no result is copied. See also
`calibration_graphs`. Run

    python -m exporters.page_calibration > toolkit/web/phone/agent/calibration_cases.json

to write the cases again.
"""

import base64
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import NodeProto, TensorProto, helper

from device_agent.formats.graph_forms import WINOGRAD
from device_agent.profiling.calibration_cases import IMAGES, POINTWISE, Shape, all_cases
from device_agent.runtime.winograd_probe import SHAPES
from exporters.calibration_graphs import graph, graphs, node
from exporters.onnx.forms.winograd import winograd
from exporters.runtime_probes import checked, step
from profiles.cost_model.workload import kind_of, sizes_of

SEVERAL = ("pointwise", "images")
"""The device's graphs with several operations. The page has one graph per operation instead."""
OVERHEADS = ("row", "side", "loop")
"""The graphs that measure a port, a node and a step of a loop."""
MOST_NUMBERS = 2**20
"""Tensors of a case have at most this many numbers, because phones have little memory."""
CONDITION = "mask"
"""The name of the boolean input; all other inputs are float32."""
CONSTANTS: dict[str, Sequence[int] | float] = {
    "half": 0.5,
    "two": 2.0,
    "around": [0, 0, 1, 1, 0, 0, 1, 1],
    "from": [1, 1],
    "to": [-1, -1],
    "pixels": [2, 3],
    "channels": [0, 2, 3],
    "first": [0],
}
ELEMENTWISE = (
    node("arithmetic", "Add", "x w", "y"),
    node("scaling", "Mul", "x half", "y"),
    node("unary", "Relu", "x", "y"),
    node("root", "Sqrt", "x", "y"),
    node("division", "Div", "x w", "y"),
    node("power", "Pow", "x two", "y"),
    node("exponential", "Exp", "x", "y"),
    node("sigmoid", "Tanh", "x", "y"),
    node("comparison", "Greater", "x w", "y"),
    node("selection", "Where", "mask x w", "y"),
    node("extreme", "Max", "x w", "y"),
)
ON_IMAGES = {
    "broadcast": [node("broadcast", "Mul", "x p", "y")],
    "broadcast_first": [node("broadcast", "Add", "x q", "y")],
    "normalisation": [node("normalisation", "BatchNormalization", "x v v v v", "y")],
    "transposition_outer": [node("transposition", "Transpose", "x", "y", perm=[1, 0, 2, 3])],
    "transposition": [node("transposition", "Transpose", "x", "y", perm=[0, 2, 3, 1])],
    "padding": [node("padding", "Pad", "x around", "y")],
    "cutting": [node("cutting", "Slice", "x from to pixels", "y")],
    "joining": [node("joining", "Concat", "x w", "y", axis=1)],
    "reduction": [node("reduction", "ReduceSum", "x channels", "y", keepdims=0)],
    "reduction_pixels": [node("reduction", "ReduceMean", "x pixels", "y")],
    "reduction_first": [node("reduction", "ReduceSum", "x first", "y", keepdims=0)],
    "expansion": [node("size", "Shape", "x", "size"), node("expansion", "Expand", "z size", "y")],
}


def all_graphs() -> dict[str, bytes]:
    """The graphs by name. Each graph measures one operation or one overhead in `OVERHEADS`."""
    wanted = {name for name, _ in all_cases()} - {*SEVERAL}
    contents = {
        name: content if name in OVERHEADS else ending_in_shape(content)
        for name, content in graphs()
        if name in wanted or name in OVERHEADS
    }
    for operation in ELEMENTWISE:
        contents[operation.name] = of_nodes([operation], dict.fromkeys(("x", "w", CONDITION), 1))
    axes = {"x": 4, "w": 4, "p": 4, "z": 4, "q": 3, "v": 1}
    for name, nodes in ON_IMAGES.items():
        contents[name] = of_nodes(nodes, axes)
    return contents


def of_nodes(nodes: Sequence[NodeProto], axes: Mapping[str, int]) -> bytes:
    """A graph of `nodes` that outputs the shape of `y`; `axes` has each input's number of axes."""
    read = [name for reader in nodes for name in reader.input]
    inputs = {name: axes[name] for name in dict.fromkeys(read) if name in axes}
    constants = {name: value for name, value in CONSTANTS.items() if name in read}
    return ending_in_shape(graph(nodes[-1].name, nodes, inputs, {"y": 1}, constants))


def ending_in_shape(content: bytes) -> bytes:
    """Return the graph `content` with the shape of `y` as its only output, instead of `y`."""
    model = onnx.load_model_from_string(content)
    model.graph.node.append(node("shape", "Shape", "y", "shape"))
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("shape", TensorProto.INT64, ["axes"]))
    for value in model.graph.input:
        if value.name == CONDITION:
            value.type.tensor_type.elem_type = TensorProto.BOOL
    return model.SerializeToString(deterministic=True)  # type: ignore[no-any-return]


def only_taking(content: bytes) -> tuple[str, bytes]:
    """Build a graph that only takes the inputs of `content`; return its name and content."""
    model = onnx.load_model_from_string(content)
    first = model.graph.input[0].name
    name = "takes_" + "_".join(value.name for value in model.graph.input)
    axes = "".join(str(len(value.type.tensor_type.shape.dim)) for value in model.graph.input)
    del model.graph.node[:], model.graph.initializer[:]
    model.graph.node.append(node("shape", "Shape", first, "shape"))
    return f"{name}_{axes}", model.SerializeToString(deterministic=True)


def cases() -> Iterator[tuple[str, dict[str, Shape]]]:
    """Yield the cases in the order in which the page runs them.

    A case is the name of a graph and the shapes of its inputs.
    """
    for size in POINTWISE:
        for operation in ELEMENTWISE:
            read = [name for name in operation.input if name not in CONSTANTS]
            yield operation.name, dict.fromkeys(read, (size,))
    for x in IMAGES:
        batch, channels, height, width = x
        shapes = {"x": x, "w": x, "q": x[1:], "v": (channels,)}
        shapes |= {"p": (1, channels, 1, 1), "z": (batch, channels, 1, 1)}
        for name, nodes in ON_IMAGES.items():
            taken = dict.fromkeys(
                key for operation in nodes for key in operation.input if key in shapes
            )
            inputs = {key: shapes[key] for key in taken}
            if name == "cutting":
                inputs["x"] = (batch, channels, height + 2, width + 2)
            yield name, inputs
    for name, given in all_cases():
        if name not in SEVERAL:
            yield name, dict(given)


def document() -> dict[str, Any]:
    """Build the content of the file: the graphs in base64, the cases and the probe.

    A case includes the sizes of its operation.

    The probe is a small training step in plain and in Winograd form; see
    `device_agent/runtime/winograd_probe.py`.
    """
    models = all_graphs()
    sessions = {name: onnxruntime.InferenceSession(content) for name, content in models.items()}
    rows: list[dict[str, Any]] = []
    bases: dict[str, bytes] = {}
    for name, shapes in cases():
        if max(np.prod(shape) for shape in shapes.values()) > MOST_NUMBERS:
            continue
        feeds = {
            key: np.ones(shape, bool if key == CONDITION else np.float32)
            for key, shape in shapes.items()
        }
        (output,) = sessions[name].run(None, feeds)
        model = onnx.load_model_from_string(models[name]).graph
        measured = model.node[-2]
        known = {**shapes, **{tensor.name: tuple(tensor.dims) for tensor in model.initializer}}
        given = [known[key] for key in measured.input if key in known]
        result = tuple(map(int, output))
        kind = kind_of(measured.op_type, given, [result])
        sizes = sizes_of(kind, given, [result])
        base, content = only_taking(models[name])
        bases[base] = content
        row = {"kind": kind, "sizes": sizes, "graph": name, "base": base}
        rows.append({**row, "inputs": shapes})
    models |= bases
    probe = {"plain": checked(step()).SerializeToString(deterministic=True)}
    probe[WINOGRAD] = winograd(probe["plain"]) or b""
    return {
        "probe": {
            "graphs": {form: base64.b64encode(data).decode() for form, data in probe.items()},
            "inputs": SHAPES,
        },
        "graphs": {name: base64.b64encode(content).decode() for name, content in models.items()},
        "cases": rows,
    }


if __name__ == "__main__":
    json.dump(document(), sys.stdout, separators=(",", ":"))
    sys.stdout.write("\n")
