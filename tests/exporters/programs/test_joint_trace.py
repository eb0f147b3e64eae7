"""Signatures that share a trace get the graphs of separate traces."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import edgetailor
from exporters.programs.program import ProgramSignature
from exporters.programs.tracing import trace
from profiles.errors import ExportError


class Scaled(nn.Module):
    """Its graph has a constant, a batch norm and a value that only the loss and a view read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x)) * torch.tensor([1.0, 2.0, 3.0])


def signatures() -> list[ProgramSignature]:
    submodel = edgetailor.split(Scaled(), "full", (4,))
    return [s for s in submodel.program.signatures if s.joint is not None]


def nodes(graph: GraphModule) -> list[tuple[str, str, str]]:
    return [
        (node.name, str(node.target), f"{node.args} {node.kwargs}") for node in graph.graph.nodes
    ]


@pytest.mark.parametrize("order", [1, -1])
def test_each_graph_is_that_of_a_trace_of_its_own(order: int) -> None:
    both = signatures()[::order]
    assert {signature.name for signature in both} == {"predict", "evaluate"}
    for signature in both:
        graph, alone = trace(signature), trace(replace(signature, joint=None))
        # torch numbers the inputs, of which the shared trace has more.
        inputs = len(signature.inputs)
        assert nodes(graph)[inputs:-1] != []
        assert [name for name, *_ in nodes(graph)[inputs:]] == [
            name for name, *_ in nodes(alone)[inputs:]
        ]
        x, y = torch.randn(5, 4), torch.randint(3, (5,))
        torch.manual_seed(0)
        feeds = [
            {"samples": x, "labels": y}.get(
                port.kind, torch.rand([size or 5 for size in port.shape])
            )
            for port in signature.inputs
        ]
        for value, expected in zip(graph(*feeds), alone(*feeds), strict=True):
            assert torch.equal(value, expected)


def test_an_error_names_the_signature_that_was_traced() -> None:
    predict, evaluate = signatures()

    def fails(feeds: object) -> dict[str, Tensor]:
        raise ValueError("no trace")

    assert predict.joint is not None
    predict.joint.signature = replace(predict.joint.signature, function=fails)
    assert nodes(trace(predict)) == nodes(trace(replace(predict, joint=None)))
    with pytest.raises(ExportError) as caught:
        trace(replace(evaluate, function=fails))
    assert "'evaluate' cannot be traced" in str(caught.value)
