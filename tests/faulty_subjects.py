"""Training steps whose graphs get faults: models, right graphs, and the values inside them."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
from torch import Tensor, nn
from torch.fx import Node

import models_for_tests
import narrow_models
from device_agent.runtime.onnx_runtime import open_model
from edgetailor import TrainingConfig, split
from exporters.embedded_weights import with_constants
from exporters.export import Format, compile_graphs, traced, with_forms
from exporters.programs.program import Program, ProgramSignature
from exporters.runtime_graph import Graph
from exporters.verification.example_inputs import examples
from exporters.verification.verdict import Verdict
from exporters.verification.verify import verify
from foreign_models import FOREIGN
from toolkit.submodels.global_model import from_model

FACTOR = 1e-4
"""A scaled value is this much too large, relative to itself."""
CHANGED = 5e-5
"""A value that changes less than this, relative to its norm, is not wrong."""
ROUNDING = 200
"""A value that changes less than this many times its rounding errors is not wrong: the result of a
sum that almost cancels. For sums over a batch see `onnx_faults.allowed_rounding`."""
BATCHES = (5, 3)
"""Numbers of samples for which verification runs training steps. It compares operators for the
last one, and for a full batch where these are computed in another way."""
FULL = 6


class Dropping(nn.Module):
    """Dropout of channels and of numbers, and a group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.channels = nn.Conv2d(2, 8, 3, padding=1), nn.Dropout2d(0.3)
        self.norm, self.drop = nn.GroupNorm(2, 8), nn.Dropout(0.5)
        self.classifier = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.channels(self.conv(x))))
        return self.classifier(self.drop(x.mean((2, 3))))


class Depthwise(nn.Module):
    """As many channels as a block has, and a depthwise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.point = nn.Conv2d(16, 16, 1)
        self.classifier = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.depthwise(torch.tanh(self.norm(self.stem(x)))))
        return self.classifier(torch.tanh(self.point(x)).mean((2, 3)))


def blocks() -> nn.Sequential:
    """Four blocks; the backward pass computes parts of them again, in another way in a form."""
    layers = [
        layer
        for width in (3, 16, 16, 16)
        for layer in (
            nn.Conv2d(width, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
        )
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))


class Case(NamedTuple):
    """A model, the shape of a sample, and the submodels to test."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    specs: Sequence[str]


CASES = {
    "smooth": Case(
        models_for_tests.smooth_cnn,
        (2, 6, 6),
        ("full", "slice:classifier", "low-rank:0.25", "cp:2.0"),
    ),
    "wide": Case(models_for_tests.wide_cnn, (2, 6, 6), ("full", "full,recompute=yes")),
    "depthwise": Case(Depthwise, (3, 7, 7), ("full", "slice:point", "cp:2.0")),
    "blocks": Case(blocks, (3, 8, 8), ("full", "low-rank:0.5", "full,recompute=yes")),
    "dropping": Case(Dropping, (2, 6, 6), ("full", "cp:2.0")),
    "signal": Case(partial(narrow_models.Signal, 4, 6), (2, 18), ("full", "cp:2.0")),
    "encoder": Case(partial(narrow_models.Encoder, 8, 2, 12), (6, 3), ("full", "low-rank:0.25")),
    "recurrent": Case(FOREIGN["recurrent"].build, (7, 6), ("full", "slice:head", "low-rank:0.5")),
    "called-twice": Case(FOREIGN["called-twice"].build, (2, 6, 6), ("full", "slice:head")),
    "tied-layers": Case(models_for_tests.tied_layers, (2, 6, 6), ("full", "low-rank:0.3")),
    "tied-tokens": Case(models_for_tests.TiedTokens, (5,), ("full",)),
}


@dataclass
class Subject:
    """A training step whose graph is verified.

    Attributes:
        signature: The step.
        program: Its program, with this signature only.
        graph: Its right graph.
        values: The stored tensors.
        compared: The operators that verification compared.
    """

    signature: ProgramSignature
    program: Program
    graph: Graph
    values: dict[str, Tensor]
    compared: set[bytes] = field(default_factory=set)
    feeds: list[dict[str, np.ndarray]] = field(default_factory=list)

    def verdict(self, graph: Graph, seed: int, compared: set[bytes] | None = None) -> Verdict:
        name: Format = "tflite" if graph.runtime == "litert" else "onnx"
        trace, graphs = partial(traced, name), {self.signature.name: graph}
        return verify(self.program, graphs, self.values, trace, seed, compared)

    def draw_feeds(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        drawn = (
            examples(self.signature.inputs, self.program, self.values, generator, batch)
            for batch in (*BATCHES, FULL)
        )
        self.feeds = [
            {n: v.numpy() for n, v in feeds.items() if n not in self.graph.held} for feeds in drawn
        ]
        if self.graph.runtime == "onnx":  # the last step reads the state behind the first one
            names = list(self.signature.replacing)
            after = exposed(self.graph.data, self.feeds[0], names)
            states = {port.state: port.name for port in self.signature.inputs}
            ports = {port.name: port.state for port in self.signature.outputs}
            for feeds in self.feeds[1:]:
                feeds.update((states[ports[name]], value) for name, value in after.items())

    @cached_property
    def named(self) -> dict[str, Node]:
        """The nodes of the traced graph by the names that the writer gave to their values."""
        graph = self.graph.traced
        assert graph is not None
        nodes = {node.name: node for node in graph.module.graph.nodes}
        # Arithmetic with sizes is no operator.
        sizes = {n for n, node in nodes.items() if not returns_tensors(node)}
        return {place.name: nodes[n] for n, place in graph.places.items() if n not in sizes}


def subjects(case: Case, spec: str, format: Format, seed: int) -> list[Subject]:
    """The training steps of a submodel. Their right graphs pass."""
    torch.manual_seed(seed)
    model = case.build()
    submodel = split(model, spec, case.shape, TrainingConfig(batch_size=FULL))
    steps = tuple(s for s in submodel.program.signatures if s.trains)
    program, values = replace(submodel.program, signatures=steps), submodel.cut(from_model(model))
    graphs = compile_graphs(program, format=format, cache=False)
    graphs = with_constants(submodel.program, with_forms(program, graphs), values)
    result = []
    for step in steps:
        own = replace(program, signatures=(step,))
        subject = Subject(step, own, graphs[step.name], values)
        verdict = subject.verdict(subject.graph, seed, subject.compared)
        assert verdict.passed, str(verdict)
        subject.draw_feeds(seed)
        result.append(subject)
    return result


def exposed(
    data: bytes, feeds: Mapping[str, np.ndarray], names: Sequence[str]
) -> dict[str, np.ndarray]:
    """The values of an ONNX file with these names."""
    model = onnx.load_from_string(data)
    known = {value.name for value in model.graph.input}
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    session = open_model(model.SerializeToString(), 1)
    given = {name: value for name, value in feeds.items() if name in known}
    return dict(zip(names, session.run(list(names), given), strict=True))


def nudged(feeds: Mapping[str, np.ndarray], draw: np.random.Generator) -> dict[str, np.ndarray]:
    """`feeds` with a rounding error in each number."""

    def with_errors(value: np.ndarray) -> np.ndarray:
        noise = 1 + 2.0**-23 * draw.standard_normal(value.shape)
        return np.asarray(value * noise, np.float32) if value.dtype == np.float32 else value

    return {name: with_errors(value) for name, value in feeds.items()}


def change(before: np.ndarray, after: np.ndarray) -> float:
    """How far a value is from its value before, relative to its norm."""
    if before.shape != after.shape:
        return float("inf")
    if before.dtype.kind != "f":
        return 0.0 if np.array_equal(before, after) else float("inf")
    a, b = np.nan_to_num(np.float64(before)), np.nan_to_num(np.float64(after))
    size, difference = float(np.linalg.norm(a)), float(np.linalg.norm(a - b))
    return difference / max(size, 1e-30)


def returns_tensors(node: Node) -> bool:
    """Whether `node` calls an operator with a tensor as result, or chooses a result."""
    schema = getattr(node.target, "_schema", None)
    return node.target is operator.getitem or "Tensor" in str(schema).split("->")[-1]


def operator_of(node: Node) -> str:
    """The name of the operator that `node` calls."""
    target: Any = node.target
    return target.name().split(".")[0] if hasattr(target, "name") else str(target)
