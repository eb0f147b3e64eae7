"""Operations read off graphs: small ones by hand, and their amounts against the MACs counted."""

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torch import nn

import onnx_graphs
from device_agent.profiling.calibration_cases import GRAPHS
from edgetailor import TrainingConfig, split
from exporters.calibration_graphs import graphs
from exporters.memory.onnx_footprint import SizedGraph
from exporters.onnx.graph_workload import graph_work, signature_work
from exporters.programs.operation_counts import macs
from profiles.cost_model.workload import Operation, amount, kind_of, sizes_of
from toolkit import models

BATCH = 4


def serialized(nodes: list[onnx.NodeProto], **shapes: list[int | str]) -> bytes:
    inputs = [onnx_graphs.value(name, shape) for name, shape in shapes.items() if name != "out"]
    model = onnx_graphs.model(nodes, inputs, [onnx_graphs.value("out", shapes["out"])])
    return bytes(model.SerializeToString())


def test_two_operators_by_hand() -> None:
    graph = serialized(
        [
            helper.make_node("MatMul", ["x", "w"], ["y"]),
            helper.make_node("Add", ["y", "b"], ["z"]),
            helper.make_node("Relu", ["z"], ["out"]),
        ],
        x=["n", 10],
        w=[10, 20],
        b=[20],
        out=["n", 20],
    )
    work = graph_work(SizedGraph(graph, BATCH), "train", state=4 * 220, times=2)
    assert set(work.operations) == {
        Operation("product", (1, 4, 20, 10)),
        Operation("broadcast", (80, 20)),
        Operation("unary", (80,)),
    }
    assert (work.nodes, work.ports, work.times, work.state) == (3, 4, 2, 880)
    assert (work.inputs, work.outputs) == (4 * (40 + 200 + 20), 4 * 80)


@pytest.mark.parametrize(
    ("operator", "inputs", "outputs", "kind", "sizes"),
    [
        ("Conv", [(4, 6, 9, 9), (8, 3, 3, 3)], [(4, 8, 7, 7)], "convolution", (8, 4, 49, 3, 9)),
        ("ConvTranspose", [(4, 8, 7, 7), (8, 3, 3, 3)], [(4, 3, 9, 9)], "transposed",
         (4, 3, 49, 8, 9)),
        ("Gemm", [(5, 4), (5, 7)], [(4, 7)], "product", (1, 4, 7, 5)),
        ("MatMul", [(2, 3, 4, 5), (2, 3, 5, 6)], [(2, 3, 4, 6)], "product", (6, 4, 6, 5)),
        ("MatMul", [(2, 3, 5), (5, 6)], [(2, 3, 6)], "product", (1, 6, 6, 5)),
        ("Mul", [(4, 8, 7, 7), ()], [(4, 8, 7, 7)], "scaling", (1568,)),
        ("Mul", [(4, 8, 7, 7), (1, 8, 1, 1)], [(4, 8, 7, 7)], "broadcast", (1568, 49)),
        ("Sub", [(4, 8, 7, 7), (4, 8, 7, 7)], [(4, 8, 7, 7)], "arithmetic", (1568,)),
        ("Add", [(4, 8), (4, 1)], [(4, 8)], "broadcast", (32, 8)),
        ("ReduceSum", [(4, 8, 7, 7), (3,)], [(8,)], "reduction", (1568, 8)),
        ("Slice", [(4, 8, 9, 9), (2,)], [(4, 8, 7, 7)], "cutting", (1568,)),
        ("Reshape", [(4, 8), (1,)], [(32,)], "view", (32,)),
        ("Unheard", [(4, 8)], [(4, 8)], "selection", (32,)),
    ],
)  # fmt: skip
def test_kinds_and_sizes(
    operator: str,
    inputs: list[tuple[int, ...]],
    outputs: list[tuple[int, ...]],
    kind: str,
    sizes: tuple[int, ...],
) -> None:
    assert kind_of(operator, inputs, outputs) == kind
    assert sizes_of(kind, inputs, outputs) == sizes


def test_products_of_a_prediction_are_the_macs_that_are_counted() -> None:
    submodel = split(models.mnist_dnn(), "full", (1, 28, 28))
    predict = next(s for s in submodel.program.signatures if s.name == "predict")
    work = signature_work(predict, BATCH)
    products = [o for o in work.operations if o.kind == "product"]
    assert sum(o.count * amount(o.kind, o.sizes) for o in products) == macs(predict, BATCH)


def test_loops_count_once_a_step() -> None:
    [content] = [content for name, content in graphs() if name == "loop"]
    model = onnx.load_from_string(content)
    for value, shape in zip(model.graph.input, ([3], [7, 3]), strict=True):
        for size, number in zip(value.type.tensor_type.shape.dim, shape, strict=True):
            size.dim_value = number
    body = model.graph.node[0].attribute[0].g
    for value in (*body.input, *body.output):
        value.type.tensor_type.shape.dim[0].dim_value = 3
    work = graph_work(SizedGraph(model.SerializeToString(), 1))
    assert set(work.operations) == {
        Operation("loop", (7,)),
        Operation("arithmetic", (3,), 7),
        Operation("unary", (3,), 7),
    }


def test_the_shipped_graphs_are_what_the_exporter_writes() -> None:
    written = {f"{name}.onnx": content for name, content in graphs()}
    shipped = {path.name: path.read_bytes() for path in GRAPHS.iterdir()}
    assert shipped == written
    assert sum(map(len, shipped.values())) < 20_000
    assert np.all([onnx.load_from_string(content).ir_version <= 10 for content in shipped.values()])


def test_the_work_of_a_blocked_form(seed: int) -> None:
    """A 3 x 3 convolution and its gradients: what is blocked, and what stays."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Tanh()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.Flatten(), nn.Linear(32 * 36, 3)),
    )
    program = split(model, "full", (3, 6, 6), TrainingConfig(batch_size=BATCH)).program
    train = next(operation for operation in program.signatures if operation.name == "train")
    work = signature_work(train, BATCH)
    products = {operation for operation in work.blocked if operation.kind == "blocked"}
    assert products == {
        Operation("blocked", (BATCH, 16, 36, 3, 9)),
        Operation("blocked", (BATCH, 32, 36, 16, 9)),
        Operation("blocked", (BATCH, 16, 36, 32, 9)),  # gradient of the second one's input
    }
    plain = [operation.sizes for operation in work.blocked if operation.kind == "convolution"]
    assert sorted(size[1] for size in plain) == [16, 32]  # gradients of the weights
    scaled = sum(operation.count for operation in work.blocked if operation.kind == "scaled")
    assert scaled >= 3
    predict = next(operation for operation in program.signatures if operation.name == "predict")
    assert signature_work(predict, BATCH).blocked == ()
