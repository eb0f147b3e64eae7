"""Frozen tensors as constants of the graph that alone reads them."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from safetensors.torch import load

from bundles import SAMPLE_SHAPE, TRAINING, tiny_model
from device_agent.formats.manifest import WEIGHTS
from device_agent.runtime.onnx_runtime import OnnxSession
from edgetailor import GlobalModel, split
from exporters.bundle_writer import bundle_files
from exporters.embedded_weights import with_constants
from exporters.export import compile_graphs, traced
from exporters.runtime_graph import Graph, Graphs
from exporters.verification.verify import verify
from toolkit.submodels.submodel import Submodel

AHEAD = {"conv.weight", "hidden.weight", "norm.bias", "bn.running_var"}
"""Some of what is ahead of the classifier."""


@pytest.fixture(scope="module")
def sliced() -> tuple[Submodel, Graphs, GlobalModel]:
    """A slice, its graphs without constants, and the global model."""
    model, numbers = tiny_model()
    submodel = split(model, "slice:classifier", SAMPLE_SHAPE, TRAINING)
    return submodel, compile_graphs(submodel.program), numbers


def initializers(graph: Graph) -> dict[str, np.ndarray]:
    held = onnx.load_from_string(graph.data).graph.initializer
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in held}


def test_stages_run_on_the_constants_that_they_hold(
    sliced: tuple[Submodel, Graphs, GlobalModel], tmp_path: Path
) -> None:
    submodel, graphs, numbers = sliced
    filled = with_constants(submodel.program, graphs, submodel.cut(numbers))
    x = np.random.default_rng().standard_normal((7, *SAMPLE_SHAPE), dtype=np.float32)
    activations = x
    for name in ("forward_0", "forward_1"):
        path = tmp_path / filled[name].file
        path.write_bytes(filled[name].data)
        activations = OnnxSession(path, 1).run({"x": activations})["output"]
    model, _ = tiny_model()
    assert isinstance(model, torch.nn.Sequential)
    expected = model[:-1].eval()(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(activations.reshape(expected.shape), expected, rtol=1e-4, atol=1e-5)


def test_what_graphs_hold_is_in_no_other_place(
    sliced: tuple[Submodel, Graphs, GlobalModel],
) -> None:
    submodel, graphs, numbers = sliced
    values = submodel.cut(numbers)
    filled = with_constants(submodel.program, graphs, values)
    held = {
        n: a for name in ("forward_0", "forward_1") for n, a in initializers(filled[name]).items()
    }
    own = {name: array for name, array in held.items() if name in numbers.tensors}
    assert own.keys() > AHEAD
    for name, array in own.items():
        np.testing.assert_array_equal(array, numbers.tensors[name].numpy())
    files = bundle_files(submodel.program, filled, values, "")
    assert own.keys().isdisjoint(load(files[WEIGHTS]))
    assert not any(name.encode() in files["manifest.json"] for name in own)
    assert {"classifier.weight", "classifier.bias"} <= load(files[WEIGHTS]).keys()


def test_the_same_numbers_give_the_same_bytes_and_others_do_not(
    sliced: tuple[Submodel, Graphs, GlobalModel],
) -> None:
    submodel, graphs, numbers = sliced
    once, again = (
        with_constants(submodel.program, graphs, submodel.cut(numbers)) for _ in range(2)
    )
    assert once == again
    moved = GlobalModel({name: tensor + 1 for name, tensor in numbers.tensors.items()})
    next_round = with_constants(submodel.program, graphs, submodel.cut(moved))
    changed = {name for name in once if once[name].data != next_round[name].data}
    assert changed == {"forward_0", "forward_1"}


def test_what_several_signatures_read_is_sent_once() -> None:
    model, numbers = tiny_model()
    static = replace(TRAINING, batch_norm="static")
    submodel = split(model, "full", SAMPLE_SHAPE, static)
    graphs = compile_graphs(submodel.program)
    assert any(entry.role == "frozen" for entry in submodel.program.tensors)
    assert with_constants(submodel.program, graphs, submodel.cut(numbers)) == graphs


def test_tflite_graphs_stay_as_they_are(sliced: tuple[Submodel, Graphs, GlobalModel]) -> None:
    submodel, graphs, numbers = sliced
    lite = {name: replace(graph, runtime="litert") for name, graph in graphs.items()}
    assert with_constants(submodel.program, lite, submodel.cut(numbers)) == lite


def test_a_wrong_constant_does_not_pass(sliced: tuple[Submodel, Graphs, GlobalModel]) -> None:
    submodel, graphs, numbers = sliced
    values = submodel.cut(numbers)
    program, trace = submodel.program, partial(traced, "onnx")
    assert verify(program, with_constants(program, graphs, values), values, trace).passed
    wrong = {**values, "hidden.weight": values["hidden.weight"] * 1.1}
    verdict = verify(program, with_constants(program, graphs, wrong), values, trace)
    assert not verdict.passed
    assert verdict.signature == "forward_1"
