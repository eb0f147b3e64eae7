"""Whose memory a session's results are, and what stays when it is dropped."""

import gc
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from onnx import NodeProto, TensorProto, helper

from commands import ROOT
from device_agent.runtime import onnx_runtime
from device_agent.runtime.onnx_runtime import OnnxSession
from device_agent.runtime.runtime_choice import open_session
from device_agent.system import process_memory
from onnx_graphs import model, value
from profiles.errors import BundleError

Port = tuple[str, int, Sequence[str | int]]
COLUMNS = 2**20
TENSORS = 16


def write(path: Path, rows: str = "n") -> Path:
    """x -> exp(exp(x)), of which the graph calls the rows `rows`, and its sum, x: (n, COLUMNS)."""
    nodes = [
        helper.make_node("Exp", ["x"], ["once"]),
        helper.make_node("Exp", ["once"], ["twice"]),
        helper.make_node("ReduceSum", ["twice"], ["sum"], keepdims=0),
    ]
    results = [value("twice", (rows, COLUMNS)), value("sum", ())]
    path.write_bytes(model(nodes, [value("x", ("n", COLUMNS))], results).SerializeToString())
    return path


@pytest.mark.parametrize("rows", ["n", "unknown"])
def test_results_are_the_callers(rows: str, tmp_path: Path) -> None:
    session = open_session("onnx", write(tmp_path / "graph.onnx", rows), "graph", 1)
    # Every other row, backwards: not in one piece.
    x = np.linspace(-1, 0, 6 * COLUMNS, dtype=np.float32).reshape(6, COLUMNS)[::-2]
    before = x.copy()
    results = session.run({"x": x})
    np.testing.assert_array_equal(x, before)
    np.testing.assert_allclose(results["twice"], np.exp(np.exp(x)), rtol=1e-6)
    assert results["sum"].shape == ()
    assert all(array.flags.owndata for array in results.values())
    first = results["twice"].copy()
    session.run({"x": 2 * x})
    np.testing.assert_array_equal(results["twice"], first)


def write_node(path: Path, node: NodeProto, inputs: Sequence[Port], *outputs: Port) -> Path:
    """A graph of one node; a port is the name, type and shape of a tensor."""
    given, results = (
        [helper.make_tensor_value_info(*p) for p in ports] for ports in (inputs, outputs)
    )
    path.write_bytes(model([node], given, results).SerializeToString())
    return path


def test_a_result_that_is_an_input(tmp_path: Path) -> None:
    x, y = ((name, TensorProto.FLOAT, ("n", 3)) for name in "xy")
    exp = helper.make_node("Exp", ["x"], ["y"])
    session = OnnxSession(write_node(tmp_path / "graph.onnx", exp, [x], y, x), 1)
    given = np.arange(15, dtype=np.float32).reshape(5, 3)
    results = session.run({"x": given})
    np.testing.assert_array_equal(results["x"], given)
    np.testing.assert_allclose(results["y"], np.exp(given), rtol=1e-6)


def test_a_result_of_another_type_is_not_written_over_an_input(tmp_path: Path) -> None:
    cast = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.INT64)
    ports = (("x", TensorProto.FLOAT, ("n", 3)), ("y", TensorProto.INT64, ("n", 3)))
    session = OnnxSession(write_node(tmp_path / "graph.onnx", cast, ports[:1], ports[1]), 1)
    whole = np.arange(60, dtype=np.float32).reshape(20, 3)  # room behind the rows that are given
    results = session.run({"x": whole[:5]}, {"y": "x"})
    np.testing.assert_array_equal(results["y"], np.arange(15).reshape(5, 3))
    np.testing.assert_array_equal(whole, np.arange(60).reshape(20, 3))


def test_a_result_whose_declared_shape_no_array_has(tmp_path: Path) -> None:
    reshape = helper.make_node("Reshape", ["x", "shape"], ["y"])
    inputs = (("x", TensorProto.FLOAT, ("n",)), ("shape", TensorProto.INT64, ("k",)))
    output = ("y", TensorProto.FLOAT, ("n",) * 4)
    session = OnnxSession(write_node(tmp_path / "graph.onnx", reshape, inputs, output), 1)
    with pytest.raises(BundleError, match=r"graph\.onnx failed in onnxruntime"):
        session.run({"x": np.ones(10**5, np.float32), "shape": np.array([-1, 1, 1, 1])})


def given_back(path: Path) -> float:
    """What goes when a session is dropped while its results are kept, in tensors of x."""
    session = OnnxSession(path, 1)
    x = np.zeros((16, COLUMNS), np.float32)
    results = session.run({"x": x})
    running = process_memory.resident_bytes()
    del session
    gc.collect()
    left = process_memory.resident_bytes()
    assert running is not None
    assert left is not None
    assert results["twice"].shape == x.shape
    return (running - left) / x.nbytes


def held_when_open(path: Path) -> float:
    """What a session holds before it runs, in tensors of COLUMNS numbers."""
    before = process_memory.resident_bytes()
    session = OnnxSession(path, 1)
    opened = process_memory.resident_bytes()
    assert before is not None
    assert opened is not None
    assert session.run({"x": np.ones(1, np.float32)})["sum"] == COLUMNS * TENSORS
    return (opened - before) / (4 * COLUMNS)


def write_zeros(path: Path) -> Path:
    """x -> sum(x + zeros), with the zeros of TENSORS tensors."""
    nodes = [
        helper.make_node("ConstantOfShape", ["size"], ["zeros"]),
        helper.make_node("Add", ["zeros", "x"], ["all"]),
        helper.make_node("ReduceSum", ["all"], ["sum"], keepdims=0),
    ]
    size = np.array([COLUMNS * TENSORS])
    made = model(nodes, [value("x", (1,))], [value("sum", ())], size=size)
    path.write_bytes(made.SerializeToString())
    return path


def child(function: str, path: Path) -> float:
    """What `function` of this file finds for `path`, in a process of its own."""
    code = f"import sys, test_onnx_runtime as t; print(t.{function}(t.Path(sys.argv[1])))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        env={"PYTHONPATH": f"{Path(__file__).parent}:{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


@pytest.mark.skipif(
    process_memory.resident_bytes() is None, reason="the system does not count memory"
)
def test_an_open_session_holds_no_large_tensor_that_constants_give(tmp_path: Path) -> None:
    # The rest is the first session's code.
    assert child("held_when_open", write_zeros(tmp_path / "graph.onnx")) < TENSORS / 2


@pytest.mark.skipif(
    process_memory.resident_bytes() is None, reason="the system does not count memory"
)
def test_a_dropped_session_gives_its_memory_back(tmp_path: Path) -> None:
    # `once` and the result of unknown size, which the session had made for itself.
    assert child("given_back", write(tmp_path / "graph.onnx", "unknown")) > 1.9


@pytest.mark.skipif(
    process_memory.resident_bytes() is None, reason="the system does not count memory"
)
def test_a_session_makes_no_result_whose_size_the_inputs_give(tmp_path: Path) -> None:
    # `once` alone: the result has as many rows as x, and is in memory once.
    assert 0.9 < child("given_back", write(tmp_path / "graph.onnx")) < 1.5


RUN = (
    "import sys, numpy, pathlib; from device_agent.runtime.onnx_runtime import OnnxSession; "
    "OnnxSession(pathlib.Path(sys.argv[1]), 1).run({'x': numpy.ones((1, 2**20), numpy.float32)})"
)


def test_nothing_is_reported_to_onnxruntimes_maker(tmp_path: Path) -> None:
    """Where its reports are on, onnxruntime keeps them below the home folder until they are sent.

    It sends none in continuous integration, and knows that by these variables.
    """
    home = tmp_path / "home"
    home.mkdir()
    known = ("ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME", "CI", "GITHUB_ACTIONS", "TF_BUILD")
    plain = {name: value for name, value in os.environ.items() if name not in known}
    subprocess.run(
        [sys.executable, "-c", RUN, str(write(tmp_path / "graph.onnx"))],
        env={**plain, "HOME": str(home)},
        check=True,
    )
    assert not list(home.iterdir())


@pytest.mark.parametrize("limits", [True, False])
def test_threads_wait_busily_for_a_short_time_or_not_at_all(
    limits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_runtime, "LIMITS_SPINNING", limits)
    read = onnx_runtime.session_options(2).get_session_config_entry
    assert read("session.intra_op.allow_spinning") == ("1" if limits else "0")
    if limits:
        assert int(read("session.intra_op.spin_duration_us")) == 50
