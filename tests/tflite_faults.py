"""Plants a fault in a TFLite graph while it is lowered, and checks that verification names it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from exporters.export import compile_graphs, traced
from exporters.runtime_graph import Graph
from faulty_subjects import CHANGED, FACTOR, ROUNDING, Subject, change, nudged, operator_of


class ScaledCall:
    """Lets one call of one lowering rule return a value that is a little too large.

    Attributes:
        calls: The operator of each call whose result can be scaled, in order.
        node: The node of the traced graph that the chosen call lowered.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, chosen: int | None) -> None:
        from exporters.tflite import tflite_writer
        from exporters.tflite.tensor_layouts import Value

        self.calls: list[str] = []
        self.lowering: Any = None
        self.result: Any = None
        rules = dict(tflite_writer.FORMS)

        def with_fault(rule: Callable[..., Any]) -> Callable[..., Any]:
            def lower(lowering: Any, *args: Any, **options: Any) -> Any:
                value = rule(lowering, *args, **options)
                if not isinstance(value, Value) or value.tensor.dtype != "float32":
                    return value
                self.calls.append("")
                if len(self.calls) - 1 != chosen:
                    return value
                factor = lowering.graph.constant(np.float32(1 + FACTOR).reshape(()))
                shape = value.tensor.shape
                tensor = lowering.emit("MUL", [value.tensor, factor], shape, "MulOptions")
                self.lowering, self.result = lowering, replace(value, tensor=tensor)
                return self.result

            return lower

        for target, rule in rules.items():
            monkeypatch.setitem(tflite_writer.FORMS, target, with_fault(rule))

    @property
    def nodes(self) -> list[str]:
        """The names of the nodes whose value is the scaled one."""
        values = self.lowering.values.items() if self.lowering is not None else ()
        return [name for name, value in values if value is self.result]


def check_tflite(subject: Subject, draw: np.random.Generator, seed: int) -> str | None:
    """Plant one fault and verify; as `check_onnx`."""
    right = subject.graph.traced
    assert right is not None
    with pytest.MonkeyPatch.context() as patch:
        counted = ScaledCall(patch, None)
        traced("tflite", subject.signature)
    chosen = int(draw.integers(len(counted.calls)))
    with pytest.MonkeyPatch.context() as patch:
        call = ScaledCall(patch, chosen)
        wrong = compile_graphs(subject.program, format="tflite", cache=False)
    graph = wrong[subject.signature.name]
    assert graph.traced is not None
    names = [n for n in call.nodes if n in graph.traced.places and n in right.places]
    wrong_names = [name for name in names if tflite_change(subject, graph, name, draw)]
    if not wrong_names:
        return None
    nodes = {node.name: node for node in graph.traced.module.graph.nodes}
    operators = {operator_of(nodes[name]) for name in wrong_names}
    verdict = subject.verdict(graph, seed)
    if verdict.passed:
        return f"not found: {operators}, call {chosen}, nodes {wrong_names}"
    if verdict.operator not in operators:
        return f"named {verdict.worst} instead of {operators}, nodes {wrong_names}"
    return ""


def tflite_change(subject: Subject, wrong: Graph, node: str, draw: np.random.Generator) -> bool:
    """Whether the value of a node is another in the `wrong` graph."""

    def value(graph: Graph, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
        assert graph.traced is not None
        assert graph.traced.values is not None
        place = graph.traced.places[node]
        return graph.traced.values(graph.data, feeds, [place.name])[place.name]

    if wrong.traced is None or wrong.traced.places[node].name in wrong.dropped:
        return False
    feeds = subject.feeds[1]
    before = value(subject.graph, feeds)
    noise = change(before, value(subject.graph, nudged(feeds, draw)))
    return change(before, value(wrong, feeds)) > max(CHANGED, ROUNDING * noise)
