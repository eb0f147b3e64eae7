"""Verification of graphs against PyTorch, and what becomes of a bundle that fails it."""

from dataclasses import replace
from pathlib import Path

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from bundles import tiny_model
from exporters import compile_graphs, export
from exporters.program import Program, Tensors
from exporters.verify import verify
from profiles.errors import VerificationError
from toolkit import split
from toolkit.weights import from_model


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
        f"verification failed: relative error 1.0e+00 (tolerance 5e-03, seed {verdict.seed}), "
        "worst tensor: 'output' of 'predict'"
    )


def test_a_bundle_that_fails_verification_is_kept_apart(tmp_path: Path) -> None:
    program, values = predicting(tiny_model()[0])
    faulty = another_when_traced(program)
    with pytest.raises(VerificationError, match=r"bundle\.failed-verification; do not deploy it"):
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


def test_a_wrong_graph_with_a_float32_constant_does_not_pass() -> None:
    program, values = predicting(Mirrored())
    verdict = verify(program, compile_graphs(another_when_traced(program)), values)
    assert not verdict.passed
    assert verdict.error == pytest.approx(1, rel=1e-3)
