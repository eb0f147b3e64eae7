"""Verification runs every form of a graph that this machine's runtime computes."""

from dataclasses import replace
from functools import partial

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from device_agent.formats.graph_forms import WINOGRAD, blocked_form
from device_agent.runtime.blocked_probe import block_size
from edgetailor import TrainingConfig, split
from exporters.export import compile_graphs, traced, with_forms
from exporters.runtime_graph import Form
from exporters.verification.verify import verify
from models_for_tests import INPUT_SHAPE, wide_cnn
from toolkit.submodels.global_model import from_model


def spoiled(data: bytes) -> bytes:
    """The graph `data` with negative constant kernels, and blocked convolutions without biases."""
    model = onnx.load_from_string(data)
    for node in model.graph.node:
        if node.op_type == "Constant":
            held = next((one.t for one in node.attribute if one.name == "value"), None)
            numbers = np.empty(0) if held is None else numpy_helper.to_array(held)
            if held is not None and numbers.ndim == 4:
                held.CopyFrom(numpy_helper.from_array(-numbers, held.name))
    for node in model.graph.node:
        if node.domain and node.op_type == "Conv" and len(node.input) > 2:
            del node.input[2:]  # the bias
    return model.SerializeToString()


@pytest.mark.parametrize("form", [WINOGRAD, blocked_form(block_size() or 0)])
def test_a_wrong_form_does_not_pass(form: str, seed: int) -> None:
    torch.manual_seed(seed)
    model = wide_cnn()
    submodel = split(model, "full", INPUT_SHAPE, TrainingConfig(batch_size=4))
    [train] = [one for one in submodel.program.signatures if one.name == "train"]
    program = replace(submodel.program, signatures=(train,))
    graphs = with_forms(program, compile_graphs(program))
    values = submodel.cut(from_model(model))
    check = partial(verify, program, values=values, trace=partial(traced, "onnx"))
    assert check(graphs).passed
    right = graphs["train"].forms.get(form)
    if right is not None:
        wrong = {form: Form(spoiled(right.data), right.footprint)}
        assert not check({"train": replace(graphs["train"], forms=wrong)}).passed
