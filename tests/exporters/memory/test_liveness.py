"""Peak memory from the graph: small graphs whose peak is known by hand, chains against a replay."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from exporters.memory.liveness import Buffer, execution_order, liveness
from exporters.memory.onnx_arena import GRAIN, arena_bytes
from exporters.memory.onnx_footprint import footprint
from onnx_graphs import model, value
from profiles.cost_model.memory_rule import ONNX
from refusals import refused

BATCH = 4
ROW = 4 * 10
"""Bytes of a row of ten numbers."""
TENSOR = BATCH * ROW
TABLE = 2**20 // 256 * 8
"""An arena of one region: its table has 8 bytes for every 256 of the first megabyte."""


def chain(*operators: str) -> onnx.ModelProto:
    """x -> each operator in turn -> sum; x: (n, 10)."""
    names = ["x", *(f"t{i}" for i in range(len(operators)))]
    nodes = [
        helper.make_node(operator, [a], [b])
        for operator, a, b in zip(operators, names, names[1:], strict=False)
    ]
    nodes.append(helper.make_node("ReduceSum", [names[-1]], ["sum"], keepdims=0))
    return model(nodes, [value("x", ("n", 10))], [value("sum", ())])


def test_a_chain_holds_two_tensors() -> None:
    lifetimes = liveness(chain("Exp", "Exp", "Exp"), BATCH)
    assert lifetimes.timeline == [TENSOR, 2 * TENSOR, 2 * TENSOR, TENSOR + 4]
    assert (lifetimes.planned, lifetimes.inputs, lifetimes.outputs) == (2 * TENSOR, TENSOR, 4)
    assert [buffer.name for buffer in lifetimes.at_peak()] == ["t0", "t1"]


def test_a_relu_writes_over_what_nobody_else_reads() -> None:
    assert liveness(chain("Exp", "Relu", "Sigmoid"), BATCH).planned == TENSOR + 4


def test_a_relu_leaves_the_input_of_the_graph_alone() -> None:
    assert liveness(chain("Relu", "Relu"), BATCH).timeline == [TENSOR, TENSOR, TENSOR + 4]


def test_a_relu_leaves_alone_what_is_still_read() -> None:
    nodes = [
        helper.make_node("Exp", ["x"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Mul", ["a", "b"], ["y"]),
    ]
    graph = model(nodes, [value("x", ("n", 10))], [value("y", ("n", 10))])
    assert liveness(graph, BATCH).timeline == [TENSOR, 2 * TENSOR, 3 * TENSOR]


def test_a_view_keeps_its_source_alive() -> None:
    nodes = [
        helper.make_node("Exp", ["x"], ["a"]),
        helper.make_node("Reshape", ["a", "flat"], ["b"]),
        helper.make_node("Exp", ["x"], ["c"]),
        helper.make_node("Reshape", ["c", "flat"], ["d"]),
        helper.make_node("Add", ["b", "d"], ["y"]),
    ]
    graph = model(
        nodes, [value("x", ("n", 10))], [value("y", ("m",))], flat=np.array([-1], np.int64)
    )
    graph.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 10 * BATCH
    assert liveness(graph, BATCH).timeline == [TENSOR, TENSOR, 2 * TENSOR, 2 * TENSOR, 3 * TENSOR]


def test_outputs_stay_to_the_end() -> None:
    nodes = [
        helper.make_node("Exp", ["w"], ["w+"]),
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
    ]
    graph = model(
        nodes, [value("x", ("n", 10)), value("w", (5,))], [value("w+", (5,)), value("sum", ())]
    )
    assert liveness(graph, BATCH).timeline == [4, 4 + 20]


def test_the_last_end_in_the_file_runs_first_and_of_inputs_the_last() -> None:
    nodes = [
        helper.make_node("Exp", ["x"], ["a"]),
        helper.make_node("Log", ["x"], ["b"]),
        helper.make_node("Mul", ["a", "b"], ["early"]),
        helper.make_node("Abs", ["x"], ["late"]),
    ]
    shape = ("n", 10)
    graph = model(nodes, [value("x", shape)], [value("early", shape), value("late", shape)])
    order = [buffer.name for buffer in liveness(graph, BATCH).buffers]
    assert order == ["late", "b", "a", "early"]


def test_a_transposed_factor_of_a_product_costs_nothing() -> None:
    nodes = [
        helper.make_node("Transpose", ["w"], ["wt"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "wt"], ["y"]),
    ]
    graph = model(nodes, [value("x", ("n", 10)), value("w", (3, 10))], [value("y", ("n", 3))])
    assert liveness(graph, BATCH).planned == BATCH * 12
    nodes[1] = helper.make_node("Add", ["x", "wt"], ["y"])
    graph = model(nodes, [value("x", ("n", 10)), value("w", (10, 1))], [value("y", ("n", 10))])
    assert liveness(graph, BATCH).planned == TENSOR + 40


def scan(body: Sequence[onnx.NodeProto], *factors: onnx.NodeProto) -> onnx.ModelProto:
    """s, x_t -> `body` -> s_next, y_t over three rows x (3, n, 10), behind `factors`."""
    inputs = [value("s", ("n", 10)), value("x_t", ("n", 10))]
    outputs = [value("s_next", ("n", 10)), value("y_t", ("n", 10))]
    graph = helper.make_graph(body, "body", inputs, outputs)
    loop = helper.make_node("Scan", ["s0", "x"], ["s3", "y"], body=graph, num_scan_inputs=1)
    ends = [helper.make_node("ReduceSum", [name], [f"sum_{name}"], keepdims=0) for name in "y"]
    return model(
        [*factors, loop, *ends],
        [value("s0", ("n", 10)), value("x", (3, "n", 10)), value("w", (10, 10))],
        [value("s3", ("n", 10)), value("sum_y", ())],
    )


def test_a_loop_takes_its_outputs_two_of_each_state_and_one_pass_through_its_body() -> None:
    body = [
        helper.make_node("Add", ["s", "x_t"], ["sum"]),
        helper.make_node("Exp", ["sum"], ["y_t"]),
        helper.make_node("Neg", ["sum"], ["s_next"]),
    ]
    lifetimes = liveness(scan(body), BATCH)
    states, rows = 3 * TENSOR, 3 * TENSOR  # the output s3 is the third
    # ONNX Runtime runs the last end first: sum, s_next, y_t, and then the sum over y.
    assert lifetimes.timeline == [
        states + TENSOR,
        states + TENSOR,
        states + TENSOR + rows,
        TENSOR + rows + 4,
    ]


def test_a_factor_that_a_product_in_a_loop_reads_transposed_is_written_out() -> None:
    factor = helper.make_node("Transpose", ["w"], ["wt"], perm=[1, 0])
    body = [
        helper.make_node("MatMul", ["s", "wt"], ["s_next"]),
        helper.make_node("Exp", ["x_t"], ["y_t"]),
    ]
    names = {buffer.name: buffer.size for buffer in liveness(scan(body, factor), BATCH).buffers}
    assert names["wt"] == 400


def test_what_is_computed_from_constants_and_the_batch_is_held() -> None:
    """Sevens for as many rows as there are samples are made in every run."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Expand", ["seven", "shape"], ["sevens"]),
        helper.make_node("Concat", ["x", "sevens"], ["y"], axis=1),
    ]
    shape = ("n", 10)
    seven = np.array(7, np.float32)
    graph = model(nodes, [value("x", shape)], [value("y", ("n", 20))], seven=seven)
    assert liveness(graph, BATCH).planned == 3 * TENSOR


def test_a_convolution_unfolds_one_image_at_a_time() -> None:
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])]
    size = 64
    graph = model(
        nodes,
        [value("x", ("n", 3, size, size)), value("w", (8, 3, 3, 3))],
        [value("y", ("n", 8, size, size))],
    )
    lifetimes = liveness(graph, BATCH)
    assert lifetimes.planned == 4 * size * size * (BATCH * 8 + 27)
    assert lifetimes.at_peak()[1].name == "Conv at work"


def test_a_convolution_of_known_weights_unfolds_nothing() -> None:
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])]
    size = 64
    graph = model(
        nodes,
        [value("x", ("n", 3, size, size))],
        [value("y", ("n", 8, size, size))],
        w=np.zeros((8, 3, 3, 3), np.float32),
    )
    assert liveness(graph, BATCH).planned == 4 * size * size * BATCH * 8


def test_shapes_that_the_graph_computes_are_followed() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["n"], start=0, end=1),
        helper.make_node("Concat", ["n", "ten"], ["wanted"], axis=0),
        helper.make_node("Expand", ["scalar", "wanted"], ["y"]),
    ]
    graph = model(
        nodes,
        [value("x", ("n", 10)), value("scalar", ())],
        [value("y", ("n", 10))],
        ten=np.array([10], np.int64),
    )
    assert liveness(graph, BATCH).planned == TENSOR


def test_shapes_that_computed_shapes_give_are_followed() -> None:
    """x -> n x 10 zeros -> 0 .. n - 1: the second shape is known once the first is."""
    nodes = [
        helper.make_node("Shape", ["x"], ["n"], start=0, end=1),
        # onnx's own inference follows no number through a Reshape.
        helper.make_node("Reshape", ["n", "vector"], ["row"]),
        helper.make_node("Concat", ["row", "ten"], ["wanted"], axis=0),
        helper.make_node("Expand", ["scalar", "wanted"], ["zeros"]),
        helper.make_node("Shape", ["zeros"], ["shape"]),
        helper.make_node("Gather", ["shape", "first"], ["limit"]),
        helper.make_node("Range", ["first", "limit", "one"], ["rows"]),
        helper.make_node("Cast", ["rows"], ["real"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["real", "scalar"], ["scaled"]),
        helper.make_node("ReduceSum", ["scaled"], ["y"], keepdims=0),
    ]
    constants = {"ten": np.array([10]), "first": np.array(0), "one": np.array(1)}
    constants["vector"] = np.array([-1])
    inputs = [value("x", ("n", 10)), value("scalar", ())]
    graph = model(nodes, inputs, [value("y", ())], **constants)
    sizes = {buffer.name: buffer.size for buffer in liveness(graph, BATCH).buffers}
    assert sizes["scaled"] == 4 * BATCH


def test_a_shape_that_depends_on_the_data_is_refused() -> None:
    nodes = [
        helper.make_node("NonZero", ["x"], ["places"]),
        helper.make_node("ReduceSum", ["places"], ["sum"], keepdims=0),
    ]
    graph = model(nodes, [value("x", ("n", 10))], [value("sum", (), TensorProto.INT64)])
    with refused("export.unknown-shape", "'places'", tensor="places"):
        liveness(graph, BATCH)


@given(st.lists(st.sampled_from(["Exp", "Relu", "Neg", "Sigmoid", "Identity"]), min_size=1))
def test_chains_against_counting_arrays_one_by_one(operators: list[str]) -> None:
    held, peak, ours = 0, 0, False
    for operator in operators:
        stays = operator == "Identity" or (ours and operator in ("Relu", "Sigmoid"))
        if stays:
            continue
        peak = max(peak, held + TENSOR)
        held, ours = TENSOR, True
    # The sum is written while its argument is still there.
    peak = max(peak, held + 4)
    assert liveness(chain(*operators), BATCH).planned == peak


def test_an_arena_takes_the_peak_where_every_gap_is_filled() -> None:
    pair = [Buffer("a", 4096, 0, 1), Buffer("b", 4096, 1, 2), Buffer("c", 4096, 2, 3)]
    assert arena_bytes(pair) == 2 * 4096 + TABLE


def test_an_arena_cannot_join_gaps_that_a_block_keeps_apart() -> None:
    """8 | 8 | 8 KiB with the middle one kept: 16 KiB need room behind."""
    k = 1024
    parted = [
        Buffer("left", 8 * k, 0, 0),
        Buffer("middle", 8 * k, 0, 2),
        Buffer("right", 8 * k, 0, 0),
        Buffer("wide", 16 * k, 1, 2),
        Buffer("guard", 8 * k, 0, 2),
    ]
    assert arena_bytes(parted, runs=1) == (8 + 8 + 8 + 8 + 16) * k + TABLE


def test_an_arena_gives_a_gap_away_whole_unless_it_is_twice_the_size() -> None:
    k = 1024
    snug = [
        Buffer("first", 8 * k, 0, 0),
        Buffer("guard", 8 * k, 0, 9),
        Buffer("small", 5 * k, 1, 2),
        Buffer("rest", 2 * k, 2, 2),
    ]
    # 2 KiB would fit beside the 5 in the gap of 8, were it cut.
    assert arena_bytes(snug, runs=1) == -(-(8 + 8 + 2) * k // 4096) * 4096 + TABLE


def test_an_arena_gives_back_each_of_two_equal_buffers() -> None:
    """Both choices of a Where are such; a second run finds their places free."""
    twins = [Buffer("Where at work", 4096, 0, 0), Buffer("Where at work", 4096, 0, 0)]
    assert arena_bytes(twins, runs=9) == 2 * 4096 + TABLE


def test_an_arena_pays_for_the_tables_of_all_its_regions() -> None:
    """A region of one megabyte, then one of the next power of two that holds the buffer."""
    mib = 2**20
    pair = [Buffer("small", mib, 0, 0), Buffer("large", 5 * mib, 0, 0)]
    assert arena_bytes(pair) == 6 * mib + (1 + 8) * TABLE


def test_of_equal_gaps_an_arena_takes_the_one_with_the_lowest_address() -> None:
    """The second region of 8 MiB lies below the first: of it, 7 MiB are used instead of 6."""
    mib = 2**20
    regions = [Buffer("first", 5 * mib, 0, 0), Buffer("second", 6 * mib, 0, 0)]
    late = Buffer("late", 7 * mib, 1, 1)
    assert arena_bytes([*regions, late], runs=1) == (5 + 7) * mib + 2 * 8 * TABLE


@given(
    st.lists(
        st.tuples(st.integers(1, 3 * 2**20), st.integers(0, 20), st.integers(0, 20)), min_size=1
    )
)
def test_an_arena_takes_no_less_than_what_is_alive(spans: list[tuple[int, int, int]]) -> None:
    buffers = [
        Buffer(str(number), size, min(a, b), max(a, b)) for number, (size, a, b) in enumerate(spans)
    ]
    alive = [sum(b.size for b in buffers if b.birth <= t <= b.death) for t in range(21)]
    total = sum(-(-buffer.size // GRAIN) * GRAIN + 4096 for buffer in buffers)
    taken = arena_bytes(buffers, runs=1)
    assert max(alive) <= taken
    # Regions double, so that all of them are at most four times what was asked for.
    tables = 4 * (total + 2**20) // 32
    assert taken <= total + sum(buffer.size for buffer in buffers) + tables


def test_the_footprint_adds_what_the_agent_and_the_session_hold() -> None:
    graph = chain("Exp", "Exp")
    memory = footprint(graph.SerializeToString(), BATCH)
    assert memory.planned == 3 * TENSOR
    assert memory.arena == 4096 + TABLE
    assert memory.process == TENSOR + 4 + 4096 + TABLE + ONNX.session_bytes + 3 * ONNX.node_bytes


def test_the_footprint_counts_what_the_graph_holds() -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    inputs, outputs = [value("x", ("n", 10))], [value("y", ("n", 3))]
    held = model(nodes, inputs, outputs, w=np.zeros((10, 3), np.float32))
    fed = model(nodes, [*inputs, value("w", (10, 3))], outputs)
    assert footprint(held.SerializeToString(), BATCH) == footprint(fed.SerializeToString(), BATCH)


def test_the_order_is_the_one_that_onnx_runtime_runs(tmp_path: Path) -> None:
    """A random graph of sines and sums, read back from the runtime's own profile."""
    draw = np.random.default_rng()
    values, nodes = ["x"], []
    for number in range(60):
        # Late ones more often, so that the graph is deep.
        first, second = (values[-1 - min(int(draw.exponential(6)), number)] for _ in range(2))
        name = f"v{number}"
        kind, inputs = ("Sin", [first]) if draw.random() < 0.5 else ("Mul", [first, second])
        nodes.append(helper.make_node(kind, inputs, [name], name=name))
        values.append(name)
    ends = sorted({*values[1:]} - {source for node in nodes for source in node.input})
    shape = ("n", 10)
    graph = model(nodes, [value("x", shape)], [value(name, shape) for name in ends])
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    session = onnxruntime.InferenceSession(graph.SerializeToString(), options)
    session.run(None, {"x": np.ones((BATCH, 10), np.float32)})
    events = json.loads(Path(session.end_profiling()).read_text())
    ran = [e["name"] for e in events if e["cat"] == "Node" and e["name"].endswith("_kernel_time")]
    predicted = [node.name for node in execution_order(ir.from_proto(graph).graph)]
    assert [name.removesuffix("_kernel_time") for name in ran] == predicted
