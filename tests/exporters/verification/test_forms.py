"""Verification runs every form of a graph that this machine's runtime computes."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from device_agent.formats.graph_forms import WINOGRAD, blocked_form
from device_agent.runtime.blocked_probe import block_size
from edgetailor import TrainingConfig, split
from exporters.export import compile_graphs, traced, with_forms
from exporters.onnx.forms import blocked_depthwise_gradient, blocked_sums
from exporters.programs.program import Program
from exporters.runtime_graph import Form, Graph
from exporters.verification.verify import verify
from form_cases import tail, with_negative_kernels
from models_for_tests import INPUT_SHAPE, wide_layers
from parameters import half_quick
from toolkit.submodels.global_model import from_model


def without_biases(data: bytes) -> bytes:
    """The graph `data`, whose blocked convolutions add no bias."""
    model = onnx.load_from_string(data)
    for node in model.graph.node:
        if node.domain and node.op_type == "Conv":
            del node.input[2:]
    return model.SerializeToString()


def with_negative_branches(data: bytes) -> bytes:
    """The graph `data`, where what only full batches compute has the other sign."""
    model = onnx.load_from_string(data)
    for node in model.graph.node:
        for full in (
            attribute.g for attribute in node.attribute if attribute.name == "then_branch"
        ):
            result = full.output[0].name
            full.node[-1].output[0] = f"{result}_positive"
            full.node.append(onnx.helper.make_node("Neg", [f"{result}_positive"], [result]))
    return model.SerializeToString()


FORMS = {WINOGRAD: with_negative_kernels}
if (block := block_size()) is not None:
    FORMS[blocked_form(block)] = without_biases


@pytest.mark.parametrize(("form", "spoil"), half_quick(FORMS.items()))
def test_a_wrong_form_does_not_pass(form: str, spoil: Callable[[bytes], bytes], seed: int) -> None:
    torch.manual_seed(seed)
    check_that_it_fails(wide_layers(), INPUT_SHAPE, form, spoil)


def with_loss_nan(data: bytes) -> bytes:
    """The graph `data` with a loss that is not a number."""
    model = onnx.load_from_string(data)
    (loss,) = [node for node in model.graph.node if "loss" in node.output]
    loss.output[0] = "right"
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(np.nan), "nan"))
    model.graph.node.append(onnx.helper.make_node("Mul", ["right", "nan"], ["loss"]))
    return model.SerializeToString()


def test_a_plain_graph_whose_results_are_no_numbers_does_not_pass(seed: int) -> None:
    """Its forms differ from it as much as it differs from itself."""
    torch.manual_seed(seed)
    program, values, graphs = step_with_forms(wide_layers(), INPUT_SHAPE)
    wrong = replace(graphs["train"], data=with_loss_nan(graphs["train"].data))
    verdict = verify(program, {"train": wrong}, values, partial(traced, "onnx"))
    assert not verdict.passed


@pytest.mark.skipif(block is None, reason="this ONNX Runtime has no blocked convolutions")
def test_what_only_full_batches_compute_is_verified(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(seed)
    monkeypatch.setattr(blocked_sums, "LEAST_BYTES", 0)
    layers = [nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.Tanh()]
    form = blocked_form(block or 0)
    check_that_it_fails(nn.Sequential(*layers, *tail(16)), (3, 9, 9), form, with_negative_branches)


@pytest.mark.skipif(block is None, reason="this ONNX Runtime has no blocked convolutions")
def test_a_small_gradient_shows_beside_the_velocity(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The depthwise layer's gradient is about 1e-4, far smaller than other layers'."""
    torch.manual_seed(seed)
    monkeypatch.setattr(blocked_depthwise_gradient, "LEAST_BYTES", 0)
    layer = nn.Conv2d(16, 16, 3, padding=2, dilation=2, groups=16)
    layers = [nn.Conv2d(3, 16, 3), nn.Tanh(), layer, nn.Tanh(), *tail(16)]
    with torch.no_grad():
        layers[-1].weight /= 4
    form, model = blocked_form(block or 0), nn.Sequential(*layers)
    check_that_it_fails(model, (3, 33, 33), form, with_negative_branches, momentum=0.9)


class Branches(nn.Module):
    """Depthwise convolutions of one value, added up as in MobileOne and RepVGG."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(16, 16, size, 2, size // 2, groups=16, bias=False), nn.BatchNorm2d(16)
            )
            for size in (1, 3, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x) + self.layers[1](x) + self.layers[2](x)


@pytest.mark.skipif(block is None, reason="this ONNX Runtime has no blocked convolutions")
def test_layers_with_one_input_are_compared_for_the_same_full_batch(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers' gradients share a view of their input with batch and channels on one axis."""
    torch.manual_seed(seed)
    monkeypatch.setattr(blocked_depthwise_gradient, "LEAST_BYTES", 0)
    form = blocked_form(block or 0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Tanh(), Branches(), nn.Tanh(), *tail(16))
    check_that_it_fails(model, (3, 10, 10), form, with_negative_branches)


def step_with_forms(
    model: nn.Module, shape: tuple[int, ...], momentum: float = 0
) -> tuple[Program, dict[str, Tensor], dict[str, Graph]]:
    """The program of the training step of `model`, its weights, and its graph with all forms."""
    submodel = split(model, "full", shape, TrainingConfig(batch_size=4, momentum=momentum))
    [train] = [s for s in submodel.program.signatures if s.name == "train"]
    program = replace(submodel.program, signatures=(train,))
    return program, submodel.cut(from_model(model)), with_forms(program, compile_graphs(program))


def check_that_it_fails(
    model: nn.Module,
    shape: tuple[int, ...],
    form: str,
    spoil: Callable[[bytes], bytes],
    momentum: float = 0,
) -> None:
    """The training step of `model` passes, and does not when its `form` is spoiled."""
    program, values, graphs = step_with_forms(model, shape, momentum)
    check = partial(verify, program, values=values, trace=partial(traced, "onnx"))
    assert check(graphs).passed
    right = graphs["train"].forms[form]
    wrong = {form: Form(spoil(right.data), right.footprint)}
    assert not check({"train": replace(graphs["train"], forms=wrong)}).passed
