"""Verification of graphs against PyTorch, and what becomes of a bundle that fails it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bundles import tiny_model
from exporters import compile_graphs, export
from exporters.program import Program, Tensors
from exporters.verify import verify
from profiles.errors import VerificationError
from toolkit import split


def predicting() -> tuple[Program, dict[str, Tensor]]:
    """The tiny model's program, cut down to its predictions, and its weights."""
    model, source = tiny_model()
    submodel = split(model, "full", (1, 6, 6))
    predict = next(s for s in submodel.program.signatures if s.name == "predict")
    return replace(submodel.program, signatures=(predict,)), submodel.cut(source)


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
    program, values = predicting()
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
    program, values = predicting()
    faulty = another_when_traced(program)
    with pytest.raises(VerificationError, match=r"bundle\.failed-verification; do not deploy it"):
        export(faulty, values, tmp_path / "bundle", base="")
    assert [path.name for path in tmp_path.iterdir()] == ["bundle.failed-verification"]
    export(faulty, values, tmp_path / "unchecked", base="", check=False)
    assert (tmp_path / "unchecked" / "predict.onnx").is_file()
