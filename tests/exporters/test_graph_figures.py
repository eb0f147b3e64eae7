"""Figures that follow from a graph alone, and how little is computed for them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import onnx
import pytest
from torch import nn

from edgetailor import TrainingConfig, split
from exporters.bundle_writer import peak_bytes, winograd_peak_bytes
from exporters.export import compile_graphs, export, with_forms
from exporters.memory import onnx_footprint, static_shapes
from exporters.memory.onnx_footprint import footprint
from exporters.onnx.forms import blocked_layout, winograd
from toolkit import models
from toolkit.submodels.global_model import from_model


def calls_of(
    function: Callable[..., object], heard: list[tuple[object, ...]]
) -> Callable[..., object]:
    """`function`, which also appends its arguments to `heard`."""

    def noted(*arguments: object, **named: object) -> object:
        heard.append(arguments)
        return function(*arguments, **named)

    return noted


def test_shapes_are_inferred_once_for_each_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain graph and its other forms share them."""
    model = models.digits_cnn()
    submodel = split(model, "full", (1, 8, 8), TrainingConfig(batch_size=6))
    heard: list[tuple[object, ...]] = []
    noted = calls_of(static_shapes.at_batch, heard)
    compile_graphs(submodel.program)
    monkeypatch.setattr(onnx_footprint, "at_batch", noted)
    values = submodel.cut(from_model(model))
    bundle = export(submodel.program, values, tmp_path / "bundle", base="", check=False)
    assert len(bundle.graphs["train"].forms) == 3
    assert [batch for _, batch in heard] == [6] * len(bundle.graphs)


def test_waits_are_gone_before_shapes_are_inferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """They read flattened tensors; onnx would make an object for each of their numbers."""
    # The second weight is large enough for waits; see `LEAST_BYTES` in `state_in_place.py`.
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.Flatten())
    program = split(model, "full", (3, 6, 6)).program
    data = compile_graphs(program)["train"].data
    assert waits(onnx.load_from_string(data))
    heard: list[tuple[object, ...]] = []
    monkeypatch.setattr(
        onnx.shape_inference,
        "infer_shapes",
        calls_of(onnx.shape_inference.infer_shapes, heard),
    )
    footprint(data, 4)
    assert heard
    assert [waits(model) for model, *_ in heard] == [[]] * len(heard)


def waits(model: object) -> list[str]:
    """The results of all choices between two equal values."""
    assert isinstance(model, onnx.ModelProto)
    choices = [node for node in model.graph.node if node.op_type == "Where"]
    return [node.output[0] for node in choices if node.input[1] == node.input[2]]


def test_peaks_are_those_of_the_graphs_and_forms() -> None:
    program = split(models.digits_cnn(), "full", (1, 8, 8), TrainingConfig(batch_size=6)).program
    plain = compile_graphs(program)["train"]
    graph = with_forms(program, {"train": plain})["train"]
    sized = onnx_footprint.SizedGraph(plain.data, 6)
    blocked = [
        sized.footprint(partial(blocked_layout.rewrite, block=block, batch=6)).process
        for block in (8, 16)
    ]
    assert peak_bytes(graph, 6) == max(footprint(plain.data, 6).process, *blocked)
    assert winograd_peak_bytes(graph) == sized.footprint(winograd.rewrite).process
    assert peak_bytes(plain, 6) == footprint(plain.data, 6).process
