"""Plants a fault in a file of a right ONNX graph, and checks that verification names it.

The file alone says which names are right. The traced graph has the values of some tensors of the
file. A fault makes the nearest of these wrong: those that depend on the faulty tensor without
another one between. The operator of one of them has to be named. A fault counts if the whole file,
run before and after, has another value there, by far more than rounding explains.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, helper, numpy_helper
from torch.fx import Node

from device_agent.formats.graph_forms import WINOGRAD, blocked_form
from device_agent.runtime.blocked_probe import block_size
from exporters.runtime_graph import Form, Graph
from faulty_subjects import (
    BATCHES,
    CHANGED,
    FACTOR,
    ROUNDING,
    Subject,
    change,
    exposed,
    nudged,
    operator_of,
)

ENDS = re.compile("(_repeated|_again)*(_blocked)?$")
"""The ends of the names of values that are computed again, or whose channels are in blocks."""
KINDS = ("scaled", "scaled", "scaled", "batch", "wired")


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
        """As `Subject.named`; a value may be in blocks, and the file may compute it again."""
        named = {}
        for name in self.values[0]:
            node = self.subject.named.get(name) or self.subject.named.get(ENDS.sub("", name))
            if node is not None:
                named[name] = node
        return named

    def with_data(self, data: bytes) -> Graph:
        """The graph of the subject with `data` in this file."""
        graph = self.subject.graph
        if self.form is None:
            return replace(graph, data=data)
        forms = {**graph.forms, self.form: Form(data, None)}
        return replace(graph, forms=forms)


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


def allowed_rounding(file: File, name: str) -> float:
    """How many rounding errors a value of the file may be off and still be right.

    Verification allows as many as a sum reads numbers for each result. No sum reads more than the
    largest tensor has, twice for a sum of products; the rest is leeway.
    """
    node, value = file.named.get(name), file.values[-1][name]
    if node is None or "sum" not in str(node.target) or value.size == 1:
        return ROUNDING
    largest = max(other.size for other in file.values[-1].values())
    return float(max(ROUNDING, 4 * largest / value.size))


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
            allowed = allowed_rounding(file, name) * noise
            by_name[name] = away if away > max(CHANGED, allowed) else 0.0
        changes.append(by_name)
    first, last, full = changes
    # What only full batches compute in another way is compared for these too.
    return {n: (max(last[n], full[n] if fault.in_choice else 0.0), first[n]) for n in reached}


def check_onnx(file: File, draw: np.random.Generator, seed: int, *, fresh: bool) -> str | None:
    """Plant one fault and verify; return what is wrong with the verdict, "" or None (no fault)."""
    fault = planted(file, draw)
    try:
        by_name = effects(file, fault)
        outputs = outputs_of(file, fault)
    except Exception as error:  # not a graph for the runtime, for example a scaled integer
        if "onnxruntime" not in type(error).__module__:
            raise
        return None
    wrong = {name for name, (last, _) in by_name.items() if last}
    if not wrong and not shows_in_a_whole_step(file, fault):
        return None
    # A later step reads state that is not finite; then no operator is compared.
    finite = all(np.isfinite(v).all() for v in outputs.values())
    subject = file.subject
    graph = file.with_data(fault.data)
    verdict = subject.verdict(graph, seed, None if fresh else set(subject.compared))
    changed = {name for name, effect in by_name.items() if any(effect)}
    names = {operator_of(file.named[name]) for name in changed if name in file.named}
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


def files_of(subject: Subject, draw: np.random.Generator) -> list[File]:
    """The plain file of a subject, and its forms that this machine runs."""
    return [File.of(subject, form, draw) for form in (None, *forms_of(subject))]


def forms_of(subject: Subject) -> list[str]:
    """The forms of a graph that this machine runs."""
    return sorted({blocked_form(block_size() or 0), WINOGRAD} & subject.graph.forms.keys())
