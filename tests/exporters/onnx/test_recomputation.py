"""What is computed twice: the same results in less memory, and nothing twice that saves none."""

from collections import Counter

import numpy as np
import onnx_ir as ir
import onnxruntime
from onnx import ModelProto, helper

import onnx_graphs
from exporters.memory.liveness import liveness
from exporters.onnx.recomputed.cheap_activations import LIMIT, RecomputeActivations
from onnx_graphs import value

ROW = 1000
BATCH = 4
TENSOR = 4 * ROW * BATCH

Step = tuple[str, list[str], str]


def step(forward: list[Step], last: str, backward: list[Step], result: str) -> ModelProto:
    """x -> `forward`, the sum of `last` as the loss, then `backward` up to `result`."""
    middle = [helper.make_node("ReduceSum", [last], ["loss"], keepdims=0)]
    # The first thing behind the loss is what all gradients begin with.
    middle.append(helper.make_node("Mul", ["loss", last], ["seed"]))
    parts = [
        [helper.make_node(kind, i, [o]) for kind, i, o in steps] for steps in (forward, backward)
    ]
    outputs = [value("loss", ()), value(result, ("n", ROW))]
    nodes = [*parts[0], *middle, *parts[1]]
    return onnx_graphs.model(nodes, [value("x", ("n", ROW))], outputs)


def recomputed(model: ModelProto) -> ModelProto:
    graph = ir.from_proto(model)
    RecomputeActivations("loss")(graph)
    return ir.to_proto(graph)


def operators(model: ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


def results(model: ModelProto) -> list[np.ndarray]:
    x = np.random.default_rng(0).standard_normal((BATCH, ROW), np.float32) / ROW
    return list(onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x}))


def layer(number: int, source: str) -> list[Step]:
    """An expensive function and its Relu."""
    return [("Sin", [source], f"s{number}"), ("Relu", [f"s{number}"], f"r{number}")]


THREE = [*layer(1, "x"), *layer(2, "r1"), *layer(3, "r2")]
BACK = [
    ("Mul", ["seed", "r3"], "g3"),
    ("Mul", ["g3", "s3"], "h3"),
    ("Mul", ["h3", "r2"], "g2"),
    ("Mul", ["g2", "s2"], "h2"),
    ("Mul", ["h2", "r1"], "g1"),
    ("Mul", ["g1", "s1"], "h1"),
]


def test_relus_beside_what_they_read_are_repeated() -> None:
    model = step(THREE, "r3", BACK, "h1")
    after = recomputed(model)
    assert operators(after) - operators(model) == Counter(Relu=3)
    for a, b in zip(results(model), results(after), strict=True):
        np.testing.assert_array_equal(a, b)
    # When g3 is made there are the loss, seed, g3, and before s1 r1 s2 r2 s3 r3, now s1 s2 s3 r3.
    assert liveness(model, BATCH).planned == 4 + 8 * TENSOR
    assert liveness(after, BATCH).planned == 4 + 6 * TENSOR


def test_relus_that_write_over_what_they_read_are_not() -> None:
    """Nobody reads s1 again, so the Relu alone is kept: keeping s1 instead would save nothing."""
    back: list[Step] = [("Mul", ["seed", "r1"], "g")]
    model = step([*layer(1, "x"), *layer(2, "r1")], "r2", back, "g")
    assert operators(recomputed(model)) == operators(model)


def test_what_is_read_behind_the_loss_only_is_computed_once() -> None:
    forward: list[Step] = [("Sin", ["x"], "s"), ("Relu", ["s"], "r"), ("Exp", ["s"], "e")]
    back: list[Step] = [("Mul", ["seed", "r"], "g"), ("Mul", ["g", "s"], "h")]
    model = step(forward, "e", back, "h")
    assert operators(recomputed(model)) == operators(model)


def test_a_chain_of_values_added_to_themselves_ends() -> None:
    """Each has two ways back, so that a walk to the beginning of 60 would never end."""
    count = 60
    forward: list[Step] = [("Add", [f"y{n}"] * 2, f"y{n + 1}") for n in range(count)]
    forward[0] = ("Add", ["x", "x"], "y1")
    back: list[Step] = [("Mul", ["seed", f"y{count - 1}"], "g")]
    model = step(forward, f"y{count}", back, "g")
    assert operators(recomputed(model))["Add"] <= count + 1


def test_a_long_chain_of_sums_is_kept_at_intervals() -> None:
    """y1 = s1 + x, y2 = s2 + y1, ...: each would need all before it, were none of them kept."""
    count = 2 * LIMIT
    forward: list[Step] = []
    back: list[Step] = []
    sums, gradient = "x", "seed"
    for number in range(1, count + 1):
        forward += [("Sin", [sums], f"s{number}"), ("Add", [f"s{number}", sums], f"y{number}")]
        sums = f"y{number}"
    for number in range(count, 0, -1):
        back += [
            ("Mul", [gradient, f"y{number}"], f"g{number}"),
            ("Mul", [f"g{number}", f"s{number}"], f"h{number}"),
        ]
        gradient = f"h{number}"
    model = step(forward, sums, back, gradient)
    after = recomputed(model)
    for a, b in zip(results(model), results(after), strict=True):
        np.testing.assert_array_equal(a, b)
    again = operators(after)["Add"] - count
    assert count / 2 <= again < count
    assert liveness(after, BATCH).planned < liveness(model, BATCH).planned - LIMIT * TENSOR / 2
