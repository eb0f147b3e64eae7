"""Plants one fault in a right graph: verification must fail and name the operator that is wrong.

The file alone says which names are right. The traced graph has the values of some tensors of the
file. A fault makes the nearest of these wrong: those that depend on the faulty tensor without
another one between. The operator of one of them has to be named. A fault counts if the whole file,
run before and after, has another value there, by far more than rounding explains.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
import torch
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, helper, numpy_helper
from torch import Tensor, nn
from torch.fx import Node

import models_for_tests
import narrow_models
from device_agent.formats.graph_forms import WINOGRAD, blocked_form
from device_agent.runtime.blocked_probe import block_size
from device_agent.runtime.onnx_runtime import open_model
from edgetailor import TrainingConfig, split
from exporters.embedded_weights import with_constants
from exporters.export import Format, compile_graphs, traced, with_forms
from exporters.onnx.forms import blocked_depthwise_gradient, blocked_sums
from exporters.programs.program import Program, ProgramSignature
from exporters.runtime_graph import Form, Graph
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
sum that almost cancels."""
BATCHES = (5, 3)
"""Numbers of samples for which verification runs training steps. It compares operators for the
last one, and for a full batch where these are computed in another way."""
FULL = 6
KINDS = ("scaled", "scaled", "scaled", "batch", "wired")


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


# ONNX


@dataclass(frozen=True)
class File:
    """A right ONNX file of a subject and all its values, for each of the feeds.

    Attributes:
        subject: The subject.
        form: The form in the file; None for the plain graph.
        data: The file.
        values: The values of all tensors for each feed.
        moved: The same after rounding errors in the feeds.
    """

    subject: Subject
    form: str | None
    data: bytes
    values: list[dict[str, np.ndarray]]
    moved: list[dict[str, np.ndarray]]

    @classmethod
    def of(cls, subject: Subject, form: str | None, draw: np.random.Generator) -> "File":
        data = subject.graph.data if form is None else subject.graph.forms[form].data
        names = [n for node in onnx.load_from_string(data).graph.node for n in node.output if n]
        values = [exposed(data, feeds, names) for feeds in subject.feeds]
        moved = [exposed(data, nudged(feeds, draw), names) for feeds in subject.feeds]
        return cls(subject, form, data, values, moved)

    @property
    def named(self) -> dict[str, Node]:
        """As `Subject.named`; a blocked form may have a value in blocks instead."""
        known = self.values[0]
        named = {}
        for name, node in self.subject.named.items():
            own = name if name in known else f"{name}_blocked"
            if own in known:
                named[own] = node
        return named

    def with_data(self, data: bytes) -> Graph:
        """The graph of the subject with `data` in this file."""
        graph = self.subject.graph
        if self.form is None:
            return replace(graph, data=data)
        forms = {**graph.forms, self.form: Form(data, None)}
        return replace(graph, forms=forms)


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


def graphs_of(
    graph: GraphProto, owner: NodeProto | None = None
) -> Iterator[tuple[GraphProto, NodeProto | None]]:
    """Yield a graph and the graphs inside its nodes, with the outermost node that has them."""
    yield graph, owner
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from graphs_of(attribute.g, owner or node)


def read_by(node: NodeProto) -> set[str]:
    """All names that `node` and the graphs inside it read."""
    names = set(node.input)
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            names.update(value.name for value in attribute.g.output)
            names.update(name for inner in attribute.g.node for name in read_by(inner))
    return names


def nearest(model: ModelProto, faulty: set[str], stops: set[str]) -> set[str]:
    """The tensors among `stops` that depend on a faulty one without another stop between."""
    reached, spread = faulty & stops, faulty - stops
    for node in model.graph.node:
        if read_by(node) & spread:
            reached |= stops.intersection(node.output)
            spread |= set(node.output) - stops
    return reached


class Fault(NamedTuple):
    """A file with a fault, the tensors that it makes wrong first, and what was done."""

    data: bytes
    faulty: set[str]
    what: str
    right_for: int | None = None  # samples
    in_choice: bool = False


def scaled(file: File, draw: np.random.Generator, right_for: int | None = None) -> Fault:
    """Multiply a random tensor, in some draws one inside a node's own graph.

    The factor is 1 + FACTOR, or the number of samples divided by `right_for`.
    """
    model = onnx.load_from_string(file.data)
    choices = [
        (graph, owner, index, output)
        for graph, owner in graphs_of(model.graph)
        for index, node in enumerate(graph.node)
        for output, name in enumerate(node.output)
        if name and (owner or file.values[0][name].dtype == np.float32)
    ]
    inner = [choice for choice in choices if choice[1] is not None]
    pool = inner if inner and draw.random() < 0.4 else choices
    graph, owner, index, output = pool[draw.integers(len(pool))]
    node = graph.node[index]
    name = node.output[output]
    node.output[output] = "right"
    graph.node.insert(index + 1, helper.make_node("Mul", ["right", "factor"], [name]))
    number = 1 + FACTOR if right_for is None else 1 / right_for
    own = "factor" if right_for is None else "share"
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(number, np.float32), own))
    if right_for is not None:
        count = [
            helper.make_node("Shape", ["x"], ["sizes"], start=0, end=1),
            helper.make_node("Cast", ["sizes"], ["counts"], to=onnx.TensorProto.FLOAT),
            helper.make_node("Squeeze", ["counts"], ["count"]),
            helper.make_node("Mul", ["count", "share"], ["factor"]),
        ]
        for number, added in enumerate(count):
            model.graph.node.insert(number, added)
    faulty = {name} if owner is None else set(owner.output)
    where = f"{node.op_type} {name!r}" + ("" if owner is None else f" inside {owner.op_type}")
    what = f"{where} scaled" + (f", right for {right_for} samples" if right_for else "")
    in_choice = owner is not None and owner.op_type == "If"
    return Fault(model.SerializeToString(), faulty, what, right_for, in_choice)


def wired(file: File, draw: np.random.Generator) -> Fault:
    """Let a random node read another tensor of the same type and shape."""
    model = onnx.load_from_string(file.data)
    values = {**file.subject.feeds[0], **file.values[0]}
    inputs = {value.name for value in model.graph.input}
    computed, choices = sorted(inputs & values.keys()), []
    for index, node in enumerate(model.graph.node):
        for number, name in enumerate(node.input):
            right = values.get(name)
            if right is None or right.size < 2:
                continue
            others = [
                other
                for other in computed
                if other != name
                and (values[other].dtype, values[other].shape) == (right.dtype, right.shape)
            ]
            if others:
                choices.append((index, number, others))
        computed += [name for name in node.output if name]
    index, number, others = choices[draw.integers(len(choices))]
    node, other = model.graph.node[index], others[draw.integers(len(others))]
    what = f"{node.op_type} {node.output[0]!r} reads {other!r} instead of {node.input[number]!r}"
    node.input[number] = other
    return Fault(model.SerializeToString(), set(node.output), what)


def planted(file: File, draw: np.random.Generator) -> Fault:
    """A random fault of a random kind."""
    kind = KINDS[draw.integers(len(KINDS))]
    if kind == "wired":
        return wired(file, draw)
    return scaled(file, draw, None if kind == "scaled" else int(draw.choice(BATCHES)))


def effects(file: File, fault: Fault) -> dict[str, tuple[float, float]]:
    """How far the fault changes the nearest values, for the last and for the first batch.

    The values are those of the traced graph and the outputs. 0 stands for what rounding may do.
    """
    model = onnx.load_from_string(fault.data)
    outputs = {value.name for value in model.graph.output}
    reached = sorted(nearest(model, fault.faulty, outputs | file.named.keys()))
    changes = []
    for feeds, right, moved in zip(file.subject.feeds, file.values, file.moved, strict=True):
        wrong = exposed(fault.data, feeds, reached) if reached else {}
        by_name = {}
        for name in reached:
            away = change(right[name], wrong[name])
            noise = change(right[name], moved[name])
            by_name[name] = away if away > max(CHANGED, ROUNDING * noise) else 0.0
        changes.append(by_name)
    first, last, full = changes
    # What only full batches compute in another way is compared for these too.
    return {n: (max(last[n], full[n] if fault.in_choice else 0.0), first[n]) for n in reached}


def check_onnx(file: File, draw: np.random.Generator, seed: int, *, fresh: bool) -> str | None:
    """Plant one fault and verify; return what is wrong with the verdict, "" or None (no fault)."""
    fault = planted(file, draw)
    try:
        by_name = effects(file, fault)
    except Exception as error:  # not a graph for the runtime, for example a scaled integer
        if "onnxruntime" not in type(error).__module__:
            raise
        return None
    wrong = {name for name, (last, _) in by_name.items() if last}
    if not wrong and not shows_in_a_whole_step(file, fault):
        return None
    # A later step reads state that is not finite; then no operator is compared.
    finite = all(np.isfinite(v).all() for v in outputs_of(file, fault).values())
    subject = file.subject
    graph = file.with_data(fault.data)
    verdict = subject.verdict(graph, seed, None if fresh else set(subject.compared))
    names = {operator_of(file.named[name]) for name in wrong if name in file.named}
    if verdict.passed:
        return f"not found: {fault.what}; {by_name}"
    if wrong and finite and (verdict.operator not in names or verdict.form != file.form):
        return f"named {verdict.worst} instead of {names}: {fault.what}; {by_name}"
    if finite and verdict.form not in (file.form, *forms_of(subject)):
        return f"wrong form: {verdict}: {fault.what}"
    return ""


def shows_in_a_whole_step(file: File, fault: Fault) -> bool:
    """Whether a fault that only the first batch has changes an output by far."""
    if fault.right_for != BATCHES[-1]:
        return False
    feeds = file.subject.feeds[0]
    for name, wrong in outputs_of(file, fault).items():
        right = file.values[0][name]
        before = feeds.get(name.removesuffix("+"))
        moved = right if before is None else right - before
        size = float(np.linalg.norm(moved))
        if size > 1e-2 * right.size**0.5 and np.linalg.norm(wrong - right) > 0.2 * size:
            return True
    return False


def outputs_of(file: File, fault: Fault) -> dict[str, np.ndarray]:
    """The outputs of the faulty file for the first batch."""
    names = [value.name for value in onnx.load_from_string(fault.data).graph.output]
    return exposed(fault.data, file.subject.feeds[0], names)


def returns_tensors(node: Node) -> bool:
    """Whether `node` calls an operator with a tensor as result, or chooses a result."""
    schema = getattr(node.target, "_schema", None)
    return node.target is operator.getitem or "Tensor" in str(schema).split("->")[-1]


def operator_of(node: Node) -> str:
    """The name of the operator that `node` calls."""
    target: Any = node.target
    return target.name().split(".")[0] if hasattr(target, "name") else str(target)


def files_of(subject: Subject, draw: np.random.Generator) -> list[File]:
    """The plain file of a subject, and its forms that this machine runs."""
    return [File.of(subject, form, draw) for form in (None, *forms_of(subject))]


def forms_of(subject: Subject) -> list[str]:
    """The forms of a graph that this machine runs."""
    return sorted({blocked_form(block_size() or 0), WINOGRAD} & subject.graph.forms.keys())


# TFLite


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


# Tests


def run(cases: Sequence[tuple[str, str, Format]], draws: int, seed: int) -> None:
    """Plant `draws` faults that count in the submodels (model, spec, format), in turn."""
    draw = np.random.default_rng(seed)
    failures, count = [], 0
    for number, (name, spec, format) in enumerate(cases):
        steps = subjects(CASES[name], spec, format, seed)
        wanted = draws * (number + 1) // len(cases)
        files = [f for s in steps for f in files_of(s, draw)] if format == "onnx" else []
        while count < wanted:
            own = int(draw.integers(2**31))
            if format == "onnx":
                file = files[draw.integers(len(files))]
                result = check_onnx(file, np.random.default_rng(own), seed, fresh=own % 10 == 0)
            else:
                step = steps[draw.integers(len(steps))]
                result = check_tflite(step, np.random.default_rng(own), seed)
            count += result is not None
            if result:
                failures.append(f"{name} {spec} {format} (draw {own}): {result}")
                print(failures[-1], flush=True)
    assert not failures, "\n".join(failures)


@pytest.fixture
def always_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sums are computed in blocks too, so that forms have graphs inside `If`."""
    monkeypatch.setattr(blocked_sums, "LEAST_BYTES", 0)
    monkeypatch.setattr(blocked_depthwise_gradient, "LEAST_BYTES", 0)


@pytest.mark.usefixtures("always_in_blocks")
def test_some_planted_faults_are_found_and_named(seed: int) -> None:
    run([("depthwise", "full", "onnx"), ("tied-tokens", "full", "onnx")], 8, seed)


def test_some_planted_tflite_faults_are_found_and_named(seed: int) -> None:
    pytest.importorskip("ai_edge_litert", reason="needs the extras [tflite] and [litert]")
    run([("tied-tokens", "full", "tflite")], 3, seed)


@pytest.mark.long
@pytest.mark.usefixtures("always_in_blocks")
@pytest.mark.parametrize("name", CASES)
def test_planted_faults_are_found_and_named(name: str, seed: int) -> None:
    """Twenty faults in each model, half of them for each family in the formats that it has."""
    specs = CASES[name].specs
    run([(name, spec, "onnx") for spec in specs], 14, seed)
    pytest.importorskip("ai_edge_litert", reason="needs the extras [tflite] and [litert]")
    no_recomputation = [spec for spec in specs if "recompute" not in spec]
    run([(name, spec, "tflite") for spec in no_recomputation], 6, seed)
