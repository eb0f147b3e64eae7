"""Products with large weights: the weight comes first where it is trained."""

import onnx
import pytest
import torch
from torch import nn

from device_agent.runtime.onnx_runtime import open_model
from edgetailor import TrainingConfig, split
from exporters.onnx.large_factors import LARGE
from exporters.onnx.onnx_writer import to_onnx
from form_cases import CLASSES, Case, check

INNER = 512
WIDE = LARGE // INNER


def model(wide: int, bias: bool = True) -> nn.Module:
    layers = [nn.Linear(wide, INNER, bias), nn.Tanh(), nn.Linear(INNER, CLASSES)]
    return nn.Sequential(*layers)


def first_factors(graph: bytes) -> list[str]:
    """The first factor of every product with the large weight or its transpose."""
    nodes = onnx.load_from_string(graph).graph.node
    turned = {n.output[0] for n in nodes if n.op_type == "Transpose" and n.input[0] == "0.weight"}
    products = [n.input for n in nodes if n.op_type in ("Gemm", "MatMul")]
    return [given[0] for given in products if turned & {*given} or "0.weight" in given[:2]]


@pytest.mark.parametrize("wide", [WIDE - 1, WIDE])
def test_the_large_weight_of_a_trained_layer_comes_first(wide: int, seed: int) -> None:
    torch.manual_seed(seed)
    case = Case.of(model(wide), (wide,))
    graph = to_onnx(case.signature)
    assert first_factors(graph) == (["0.weight"] if wide == WIDE else ["x"])
    for batch in (1, 5):
        feeds = case.feeds(seed, batch)
        session = open_model(graph, 1)
        names = [output.name for output in session.get_outputs()]
        came = session.run(names, {key: value.numpy() for key, value in feeds.items()})
        check(case.signature, dict(zip(names, came, strict=True)), feeds)


@pytest.mark.parametrize("bias", [True, False])
def test_a_weight_that_is_not_trained_keeps_its_place(bias: bool) -> None:
    program = split(model(WIDE, bias), "full", (WIDE,), TrainingConfig(batch_size=4)).program
    predict = next(s for s in program.signatures if s.name == "predict")
    assert first_factors(to_onnx(predict)) == ["x"]
