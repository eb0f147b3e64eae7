"""Verification of graphs against PyTorch, and what becomes of a bundle that fails it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

import edgetailor as et
from bundles import tiny_model
from device_agent.formats.manifest import TensorEntry
from edgetailor import TrainingConfig, split
from exporters.decompositions import batch_norm
from exporters.export import Format, compile_graphs, export, traced
from exporters.programs.program import (
    Program,
    ProgramSignature,
    Tensors,
    samples_port,
    scalar_port,
    state_in,
    state_out,
)
from exporters.runtime_graph import Graphs
from exporters.verification import verify as verification
from exporters.verification.operators import TOLERANCE
from exporters.verification.verdict import Verdict
from exporters.verification.verify import SignatureCheck
from parameters import needs_litert
from refusals import refused
from toolkit.submodels.global_model import from_model


def verify(program: Program, graphs: Graphs, values: Tensors, seed: int | None = None) -> Verdict:
    """The verdict on ONNX or TFLite graphs, which are traced again if the cache has them."""
    runtime = next(iter(graphs.values())).runtime
    trace = partial(traced, "tflite" if runtime == "litert" else "onnx")
    return verification.verify(program, graphs, values, trace, seed)


class Mirrored(nn.Module):
    """(N, 1, 6, 6) -> (N, 3) through a float32 constant, which float64 does not mix with."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.classifier = nn.Linear(36, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        mirror = torch.eye(8).flip(0)
        return self.classifier(torch.tanh(self.hidden(x.flatten(1))) @ mirror)


def predicting(model: nn.Module) -> tuple[Program, dict[str, Tensor]]:
    """The program of `model`, cut down to its predictions, and its weights."""
    submodel = split(model, "full", (1, 6, 6))
    predict = next(s for s in submodel.program.signatures if s.name == "predict")
    return replace(submodel.program, signatures=(predict,)), submodel.cut(from_model(model))


def another_when_traced(program: Program) -> Program:
    """`program` as an exporter with a fault would turn it into a graph: twice what it should be.

    Verification runs the function in float64, tracing in float32.
    """
    (predict,) = program.signatures

    def function(feeds: Tensors) -> dict[str, Tensor]:
        output = predict.function(feeds)["output"]
        return {"output": output if feeds["x"].dtype == torch.float64 else 2 * output}

    return replace(program, signatures=(replace(predict, function=function),))


def test_a_wrong_graph_does_not_pass(tmp_path: Path) -> None:
    program, values = predicting(tiny_model()[0])
    right = compile_graphs(program)
    wrong = compile_graphs(another_when_traced(program))
    assert right["predict"] != wrong["predict"]
    assert verify(program, right, values).passed
    verdict = verify(program, wrong, values)
    assert not verdict.passed
    assert verdict.error == pytest.approx(1, rel=1e-3)
    assert str(verdict) == (
        f"verification failed: relative error 1.0e+00 (tolerance 1e-06, seed {verdict.seed}), "
        "worst tensor: 'output' of 'predict'"
    )


def test_a_bundle_that_fails_verification_is_kept_apart(tmp_path: Path) -> None:
    program, values = predicting(tiny_model()[0])
    faulty = another_when_traced(program)
    kept = tmp_path / "bundle.failed-verification"
    with refused("verification.failed", output="output", signature="predict", kept=str(kept)):
        export(faulty, values, tmp_path / "bundle", base="")
    assert [path.name for path in tmp_path.iterdir()] == ["bundle.failed-verification"]
    export(faulty, values, tmp_path / "unchecked", base="", check=False)
    assert (tmp_path / "unchecked" / "predict.onnx").is_file()


def test_a_model_with_a_float32_constant_is_verified(tmp_path: Path) -> None:
    model = Mirrored()
    submodel = split(model, "full", (1, 6, 6))
    values = submodel.cut(from_model(model))
    verdict = export(submodel.program, values, tmp_path / "bundle", base="").verdict
    assert verdict is not None
    assert verdict.passed
    x = torch.randn(4, 1, 6, 6)
    predict = next(s for s in submodel.program.signatures if s.name == "predict")
    feeds = {p.name: values[p.state] if p.state else x for p in predict.inputs}
    with pytest.raises(RuntimeError, match="same dtype"):
        predict.function({name: value.double() for name, value in feeds.items()})
    session = onnxruntime.InferenceSession(tmp_path / "bundle" / "predict.onnx")
    came = session.run(["output"], {name: value.numpy() for name, value in feeds.items()})[0]
    torch.testing.assert_close(torch.from_numpy(came), model(x).detach(), rtol=1e-5, atol=1e-6)


class LongSum(nn.Module):
    """(N, 1, 6, 6) -> (N, 3), scaled by a sum of a million positive numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.many, self.classifier = nn.Parameter(torch.rand(2**20)), nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(x.flatten(1)) * self.many.square().sum() / 2**20


def test_the_rounding_of_a_long_sum_is_allowed() -> None:
    program, values = predicting(LongSum())
    assert verify(program, compile_graphs(program), values).passed


def test_a_step_without_samples_is_verified() -> None:
    """As the step of `cp` that trains the global factors; its first input is a number."""
    weight = TensorEntry(name="w", role="parameter", dtype="float32", shape=(7, 2))
    ports = (scalar_port("rate"), state_in(weight)), (state_out(weight),)
    step = ProgramSignature("step", *ports, lambda feeds: {"w+": feeds["w"] * (1 - feeds["rate"])})
    program = Program("step", (1,), 2, (step,), (weight,), ())
    assert verify(program, compile_graphs(program, cache=False), {"w": torch.randn(7, 2)}).passed


def test_a_wrong_graph_with_a_float32_constant_does_not_pass() -> None:
    program, values = predicting(Mirrored())
    verdict = verify(program, compile_graphs(another_when_traced(program)), values)
    assert not verdict.passed
    assert verdict.error == pytest.approx(1, rel=1e-3)


def training(model: nn.Module, momentum: float = 0.0) -> tuple[Program, dict[str, Tensor]]:
    """The program of `model`, cut down to its training step, and its weights."""
    settings = TrainingConfig(momentum=momentum, learning_rate=0.01)
    submodel = split(model, "full", (1, 6, 6), settings)
    step = next(s for s in submodel.program.signatures if s.name == "train")
    return replace(submodel.program, signatures=(step,)), submodel.cut(from_model(model))


def with_fault(program: Program, fault: Callable[[Tensors, dict[str, Tensor]], None]) -> Program:
    """`program` whose graph, but not whose float64, has `fault` in its results."""
    (step,) = program.signatures

    def function(feeds: Tensors) -> dict[str, Tensor]:
        results = step.function(feeds)
        if feeds["x"].dtype == torch.float32:
            fault(feeds, results)
        return results

    return replace(program, signatures=(replace(step, function=function),))


def lowered(program: Program, format: Format) -> Graphs:
    """The graphs of `program`, where there is what runs them."""
    needs_litert(format)
    return compile_graphs(program, format=format)


@pytest.mark.parametrize("format", get_args(Format))
def test_a_right_training_step_passes(format: Format) -> None:
    layers = nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 3)
    program, values = training(nn.Sequential(nn.Flatten(), *layers), momentum=0.9)
    verdict = verify(program, lowered(program, format), values)
    assert verdict.passed
    assert verdict.error < TOLERANCE


def test_a_summed_loss_whose_second_step_would_diverge_passes(seed: int) -> None:
    class Positive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(16, 1024), nn.Linear(1024, 16)

        def forward(self, x: Tensor) -> Tensor:
            return torch.logit(torch.sigmoid(self.last(self.first(x))))

    torch.manual_seed(seed)
    model = Positive()
    config = TrainingConfig(batch_size=4, loss="own_losses:summed")
    submodel = split(model, "full", (16,), config)
    values = submodel.cut(from_model(model))
    assert verify(submodel.program, compile_graphs(submodel.program), values, seed).passed


def test_a_gradient_that_is_little_beside_its_weight_is_seen(seed: int) -> None:
    """Off by a tenth: beside the weights, which a step changes little, far below the tolerance."""
    torch.manual_seed(seed)
    program, values = training(nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Linear(8, 3)))

    def fault(feeds: Tensors, results: dict[str, Tensor]) -> None:
        results["1.weight+"] += 0.1 * (results["1.weight+"] - feeds["1.weight"])

    verdict = verify(program, compile_graphs(with_fault(program, fault)), values)
    assert (verdict.passed, verdict.output) == (False, "1.weight+")
    assert verdict.error == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize("format", get_args(Format))
def test_a_step_that_knows_one_batch_size_only_is_seen(format: Format) -> None:
    program, values = training(nn.Sequential(nn.Flatten(), nn.Linear(36, 3)))

    def fault(feeds: Tensors, results: dict[str, Tensor]) -> None:
        results["loss"] = results["loss"] * feeds["x"].shape[0] / 8

    verdict = verify(program, lowered(with_fault(program, fault), format), values)
    assert (verdict.passed, verdict.output) == (False, "loss")


@pytest.mark.parametrize("wrong", [False, True])
def test_what_rounding_does_to_the_same_inputs_is_allowed(wrong: bool, seed: int) -> None:
    """Rounding turns this sine by hundredths of a radian; a wrong sign is not excused."""
    x = samples_port((50,))
    slope, sign = 4e5, -1 if wrong else 1

    def function(feeds: Tensors) -> dict[str, Tensor]:
        single = feeds["x"].dtype == torch.float32
        return {"output": torch.sin(feeds["x"] * slope) * (sign if single else 1)}

    signature = ProgramSignature("wave", (x,), (samples_port((50,), "output"),), function)
    program = Program("wave", (50,), 2, (signature,), (), ())
    verdict = verify(program, compile_graphs(program), {}, seed)
    assert verdict.passed is not wrong


class Deep(nn.Sequential):
    """(N, 1, 6, 6) -> (N, 3): layers whose batch norms of few values make rounding grow."""

    def __init__(self, count: int = 10) -> None:
        layers = [
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
            for _ in range(count)
        ]
        super().__init__(nn.Conv2d(1, 4, 3, stride=3), *layers, nn.Flatten(), nn.Linear(16, 3))


def verdicts(program: Program, graphs: Graphs, values: Tensors, seed: int) -> list[Verdict]:
    """All verdicts on the only signature of `program`."""
    (signature,) = program.signatures
    generator = torch.Generator().manual_seed(seed)
    graph = graphs[signature.name]
    check = SignatureCheck(signature, graph, program, values, generator, seed, set())
    return list(check.verdicts(partial(traced, "onnx")))


def with_scaled_value(graphs: Graphs, name: str, factor: float) -> Graphs:
    """ONNX `graphs` whose value `name` is `factor` times what it should be."""
    (graph,) = graphs.values()
    model = onnx.load_from_string(graph.data)
    (index,) = [n for n, node in enumerate(model.graph.node) if name in node.output]
    node = model.graph.node[index]
    node.output[0] = "right"
    model.graph.initializer.append(numpy_helper.from_array(np.float32(factor), "factor"))
    scaled = onnx.helper.make_node("Mul", ["right", "factor"], [name])
    model.graph.node.insert(index + 1, scaled)
    return {"train": replace(graph, data=model.SerializeToString())}


def test_a_wrong_operator_in_a_deep_net_is_found_and_named(seed: int) -> None:
    """A thousandth too much: less than rounding does to the whole step."""
    torch.manual_seed(seed)
    program, values = training(Deep())
    right = compile_graphs(program, cache=False)
    assert all(verdict.passed for verdict in verdicts(program, right, values, seed))
    # The seventh convolution of the forward pass is that of layer 6.
    all_verdicts = verdicts(program, with_scaled_value(right, "convolution_6", 1.001), values, seed)
    *others, operator = all_verdicts
    assert all(verdict.passed for verdict in others)
    assert (operator.passed, operator.operator) == (False, "aten::convolution")
    assert operator.error == pytest.approx(1e-3, rel=1e-2)
    assert operator.output in ("6.0.weight", "6.0.bias")
    assert "(module '6.0'" in operator.place
    assert "aten::convolution near '6.0." in str(operator)


def test_an_operator_that_reads_an_input_of_later_ones_is_found_and_named() -> None:
    layers = nn.Flatten(), nn.Linear(36, 3)
    program, values = training(nn.Sequential(*layers), momentum=0.9)
    (graph,) = compile_graphs(program).values()
    model = onnx.load_from_string(graph.data)
    first = next(node for node in model.graph.node if "1.weight" in node.input)
    first.input[list(first.input).index("1.weight")] = "momentum:1.weight"
    wrong = {"train": replace(graph, data=model.SerializeToString())}
    verdict = verify(program, wrong, values)
    assert not verdict.passed
    assert (verdict.operator or "").startswith("aten::")


def test_a_wrong_decomposition_is_found_and_named(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    torch.manual_seed(seed)
    operator = torch.ops.aten.native_batch_norm_backward.default
    form = batch_norm.DECOMPOSITIONS[operator]

    def wrong(*args: object) -> tuple[Tensor, ...]:
        d_x, d_weight, d_bias = form(*args)
        return d_x * 1.00001, d_weight, d_bias

    monkeypatch.setitem(batch_norm.DECOMPOSITIONS, operator, wrong)
    program, values = training(Deep(4))
    verdict = verify(program, compile_graphs(program, cache=False), values, seed)
    assert not verdict.passed
    assert verdict.operator == "aten::native_batch_norm_backward (its decomposition)"
    assert verdict.output == "4.1.weight"  # the first one on the way back
    assert "module '4.1'" in verdict.place


def test_a_wrong_tflite_operator_is_found_and_named(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    pytest.importorskip("ai_edge_litert", reason="needs the extras [tflite] and [litert]")
    from exporters.tflite import tflite_writer

    torch.manual_seed(seed)
    operator = torch.ops.aten.addmm.default
    form = tflite_writer.FORMS[operator]

    def wrong(lowering: Any, *args: Any, **options: Any) -> Any:
        value = form(lowering, *args, **options)
        factor = lowering.graph.constant(np.float32(1.001).reshape(()))
        inputs = [value.tensor, factor]
        return replace(value, tensor=lowering.emit("MUL", inputs, value.tensor.shape, "MulOptions"))

    monkeypatch.setitem(tflite_writer.FORMS, operator, wrong)
    program, values = training(Deep(4))
    graphs = compile_graphs(program, format="tflite", cache=False)
    verdict = verify(program, graphs, values, seed)
    assert (verdict.passed, verdict.operator) == (False, "aten::addmm")
    assert verdict.output in ("6.weight", "6.bias")
    assert verdict.error == pytest.approx(1e-3, rel=1e-2)


def test_a_class_is_equal_to_the_largest_only_as_the_runtime_rounds(
    seed: int, tmp_path: Path
) -> None:
    """A TFLite file has no tensor for the result of a convolution of one position."""
    pytest.importorskip("ai_edge_litert", reason="needs the extras [tflite] and [litert]")
    torch.manual_seed(seed)
    layers = nn.Linear(6, 12), nn.Unflatten(1, (12, 1, 1)), nn.Conv2d(12, 4, 1), nn.Flatten()
    model = nn.Sequential(*layers)
    submodel = split(model, "full", (6,), TrainingConfig(batch_size=4))
    assert et.export(submodel, from_model(model), tmp_path / "bundle", format="tflite").verdict


class NormedAcross(nn.Module):
    """A group norm of a transposed tensor, as in the paths of a dual-path network."""

    def __init__(self) -> None:
        super().__init__()
        self.path, self.norm, self.last = nn.Linear(3, 4), nn.GroupNorm(1, 4), nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.path(x).transpose(1, 2)).flatten(1))
        return out


def test_a_group_norm_of_a_transposed_tensor_is_verified(tmp_path: Path) -> None:
    submodel = split(model := NormedAcross(), "full", (5, 3), TrainingConfig(batch_size=4))
    assert et.export(submodel, from_model(model), tmp_path / "bundle", verify=True).verdict
