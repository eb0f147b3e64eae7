"""Graphs that no export makes are refused before a runtime opens them. `onnx` makes them here."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from bundles import BundleOf
from device_agent.runtime.graph_check import check_graph, foreign
from device_agent.runtime.onnx_runtime import OnnxSession
from profiles.errors import BundleError
from refusals import refused
from unsafe_graphs import UNSAFE


def value(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [2])


def graph(*nodes: onnx.NodeProto, **given: object) -> onnx.GraphProto:
    return helper.make_graph(list(nodes), "g", [value("x")], [value("y")], **given)


def model(made: onnx.GraphProto) -> onnx.ModelProto:
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)])


def plain() -> onnx.ModelProto:
    """Add of a constant, within a branch of If: nested as deep as exports are."""
    held = numpy_helper.from_array(np.ones(2, np.float32), "one")
    then = helper.make_graph(
        [helper.make_node("Add", ["x", "one"], ["z"], domain="ai.onnx")], "t", [], [value("z")]
    )
    other = helper.make_graph([helper.make_node("Neg", ["x"], ["z"])], "e", [], [value("z")])
    branch = helper.make_node("If", ["yes"], ["y"], then_branch=then, else_branch=other)
    truth = numpy_helper.from_array(np.array(True), "yes")
    return model(graph(branch, initializer=[held, truth]))


@pytest.mark.parametrize(
    ("change", "found"),
    UNSAFE,
)
def test_what_no_export_has_is_refused(
    change: Callable[[onnx.ModelProto], None], found: str, tmp_path: Path
) -> None:
    unsafe = plain()
    path = tmp_path / "train.onnx"
    path.write_bytes(unsafe.SerializeToString())
    check_graph(path)
    change(unsafe)
    path.write_bytes(unsafe.SerializeToString())
    with refused("bundle.unsafe-graph", found=found, file="train.onnx"):
        OnnxSession(path, 1)


def test_operators_that_remember_earlier_runs_are_refused(tmp_path: Path) -> None:
    drawn = model(graph(helper.make_node("RandomNormalLike", ["x"], ["y"])))
    (tmp_path / "train.onnx").write_bytes(drawn.SerializeToString())
    with refused("bundle.unsafe-graph", found="the operator 'RandomNormalLike'"):
        check_graph(tmp_path / "train.onnx")


def test_exports_pass(bundle_of: BundleOf) -> None:
    paths = list(bundle_of("full").glob("*.onnx"))
    assert paths
    for path in paths:
        check_graph(path)
        exported = onnx.load(path)  # what the rule stands for
        assert {node.domain for node in exported.graph.node} == {""}
        assert not exported.functions


@given(st.data())
def test_damaged_bytes_end_with_an_answer(data: st.DataObject) -> None:
    content = bytearray(plain().SerializeToString())
    for position, byte in data.draw(
        st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)), max_size=6)
    ):
        content[position] = byte
    cut = content[: data.draw(st.integers(0, len(content)))]
    with suppress(ValueError, IndexError):
        foreign(memoryview(bytes(cut)))


def test_bytes_that_are_no_graph(tmp_path: Path) -> None:
    (tmp_path / "g.onnx").write_bytes(b"no graph")
    with pytest.raises(BundleError, match="the graph has bytes that are not ONNX"):
        check_graph(tmp_path / "g.onnx")


def test_graphs_within_graphs_end() -> None:
    """Python would end with a RecursionError. The library `onnx` refuses to make such a file."""

    def message(number: int, content: bytes) -> bytes:
        size, written = len(content), b""
        while size > 127:
            size, written = size >> 7, written + bytes([size & 127 | 128])
        return bytes([number << 3 | 2]) + written + bytes([size]) + content

    inner = b""
    for _ in range(2000):
        inner = message(1, message(5, message(6, inner)))
    assert foreign(memoryview(message(7, inner))) == "too many graphs within graphs"
