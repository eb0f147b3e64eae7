"""Verifies the graphs of a program on new random inputs, in three comparisons.

1. The traced graph is compared with PyTorch's autograd, both in float64. This tests the formulas.
2. Each operator in the runtime is compared with the same operator of the traced graph. This tests
   the file and the runtime.
3. Whole steps in the runtime are compared with autograd, with a wide tolerance. This tests the file
   as a device runs it, in each form that this machine's runtime computes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

from device_agent.formats.graph_forms import WINOGRAD, blocked_form
from device_agent.runtime.blocked_probe import block_size
from exporters.programs.program import Program, ProgramSignature
from exporters.programs.tracing import TracedGraph
from exporters.runtime_graph import Graph, Graphs
from exporters.verification.decomposition_check import wrong_decomposition
from exporters.verification.expected_outputs import ExpectedOutputs
from exporters.verification.graph_values import LazyOutputs, Values, by_effort, computes_tensor
from exporters.verification.locations import nearest_parameter, operator_name, place_in_source
from exporters.verification.onnx_operators import ComparedFile, OnnxComparison
from exporters.verification.operators import (
    TOLERANCE,
    Comparison,
    OperatorError,
    compare_exposed,
)
from exporters.verification.verdict import Verdict, worst
from exporters.verification.whole_step import (
    CHOICE,
    ExampleInputs,
    GraphRunner,
    Output,
    Step,
    Tensors,
    batches_of,
    error,
    errors,
    tolerances,
)

TRACED_TOLERANCE = 1e-6
"""Largest error of the traced graph in float64. float64 rounds to 1e-16, so even a deep net that
makes rounding errors a million times larger stays far below."""

Trace = Callable[[ProgramSignature], TracedGraph]
"""Traces a signature again, for a graph that comes from the cache."""


def verify(
    program: Program,
    graphs: Graphs,
    values: Mapping[str, Tensor],
    trace: Trace,
    seed: int | None = None,
    compared: set[bytes] | None = None,
) -> Verdict:
    """Compare every signature of a program, as the device's runtime runs it, with PyTorch.

    Args:
        program: The program of a submodel.
        graphs: The graph of every signature of `program`.
        values: Tensors that the bundle stores, by name. Other state starts at random.
        trace: Called to trace a signature again if its graph came from the cache and has no
            `traced`.
        seed: Fixes the random inputs. By default, a new seed is drawn; the verdict names it.
        compared: Which operators earlier calls compared; see `OnnxComparison`. They are not
            compared again, and new ones are added.

    Returns:
        The verdict on the worst value: the largest error relative to its tolerance.
    """
    if seed is None:
        seed = int(np.random.SeedSequence().generate_state(1)[0])
    generator = torch.Generator().manual_seed(seed)
    known = set[bytes]() if compared is None else compared
    return worst(
        verdict
        for signature in program.signatures
        for verdict in SignatureCheck(
            signature, graphs[signature.name], program, values, generator, seed, known
        ).verdicts(trace)
    )


class SignatureCheck:
    """Makes the three comparisons for one signature and its `graph`."""

    def __init__(
        self,
        signature: ProgramSignature,
        graph: Graph,
        program: Program,
        values: Tensors,
        generator: torch.Generator,
        seed: int,
        compared: set[bytes],
    ) -> None:
        self.signature, self.graph, self.program = signature, graph, program
        self.generator, self.seed, self.compared = generator, seed, compared
        self.inputs = ExampleInputs(signature, program, values, generator)

    def verdicts(self, trace: Trace) -> Iterator[Verdict]:
        """Yield the verdicts of all comparisons."""
        traced = self.graph.traced or trace(self.signature)
        forms = sorted({blocked_form(block_size() or 0), WINOGRAD}.intersection(self.graph.forms))
        plain = GraphRunner(self.signature, self.graph)
        for form in forms:
            yield from self.form(form, plain)
        order = by_effort(traced.module)
        expected = ExpectedOutputs(self.signature, order)
        for step in self.steps(plain):
            if step.number < step.steps:
                right = expected.of(step.feeds)
                by_output = errors(self.signature, step.outputs, right, step.feeds)
                yield self.whole_step(step, by_output, expected.of)
        del plain
        yield from self.last_step(step, traced, forms, LazyOutputs(traced.module, order), expected)

    def steps(self, runner: GraphRunner, form: str | None = None) -> Iterator[Step]:
        """Run and yield consecutive steps of the graph, or of its `form`."""
        data = self.graph.forms[form].data if form else self.graph.data
        batches = batches_of(self.signature, self.program, data)
        feeds, outputs = self.inputs.first(batches[0]), dict[str, Tensor]()
        for number, batch in enumerate(batches, 1):
            if number > 1:
                feeds = self.inputs.after(outputs, feeds, batch)
            outputs = runner.run(feeds)
            yield Step(feeds, outputs, number, len(batches), form)

    def form(self, form: str, plain: GraphRunner) -> Iterator[Verdict]:
        """Yield the verdict on each step of a form, compared with the plain graph."""
        for step in self.steps(GraphRunner(self.signature, self.graph, form), form):
            right = plain.outputs(step.feeds)
            by_output = errors(self.signature, step.outputs, right, step.feeds)
            yield self.whole_step(step, by_output, plain.outputs)

    def whole_step(
        self,
        step: Step,
        by_output: Mapping[int, float],
        right: Callable[[Tensors], Iterable[Output]],
    ) -> Verdict:
        """The verdict on the worst output of one step.

        Args:
            step: The step.
            by_output: The error of each output.
            right: Computes the right outputs for given inputs.
        """
        allowed = tolerances(self.signature, by_output, right, step.feeds, self.generator)
        return worst(
            self.verdict(
                self.signature.outputs[number].name,
                error,
                allowed[number],
                step=step.number,
                steps=step.steps,
                form=step.form,
            )
            for number, error in by_output.items()
        )

    def last_step(
        self,
        step: Step,
        traced: TracedGraph,
        forms: Sequence[str],
        lazy: LazyOutputs,
        expected: ExpectedOutputs,
    ) -> Iterator[Verdict]:
        """Yield the verdicts on the last step, on its formulas and on its operators."""
        comparison = Comparison(traced.module, self.generator)
        feeds = [step.feeds[port.name] for port in self.signature.inputs]
        shapes: dict[Node, torch.Size] = {}
        pieces = None
        if self.graph.runtime == "onnx":
            pieces = self.pieces(step, traced, forms, lazy, comparison)
            computed = lazy.run(feeds, pieces.judge, pieces.also_read)
        else:
            computed = lazy.run(feeds, partial(note_shape, shapes))
        by_output, formulas = dict[int, float](), dict[int, float]()
        outputs = dict(step.outputs)
        for (number, value), (_, right) in zip(computed, expected.of(step.feeds), strict=True):
            name = self.signature.outputs[number].name
            by_output[number] = error(self.signature, number, outputs, right, step.feeds)
            formulas[number] = error(self.signature, number, {name: value}, right, step.feeds)
        yield self.whole_step(step, by_output, expected.of)
        yield self.formulas(step, traced, formulas)
        if pieces is not None:
            self.full_batch(step, pieces, traced)
        else:
            names = [port.name for port in self.signature.inputs]
            compare_exposed(comparison, self.graph, traced, feeds, names, shapes)
        if comparison.worst is not None:
            yield self.operator(traced, comparison.worst)

    def pieces(
        self,
        step: Step,
        traced: TracedGraph,
        forms: Sequence[str],
        lazy: LazyOutputs,
        comparison: Comparison,
    ) -> OnnxComparison:
        """The comparison of the operators of an ONNX graph and of its `forms`."""
        inputs = self.placeholders(traced)
        order = {node: n for n, node in enumerate(filter(computes_tensor, lazy.steps))}
        files = [ComparedFile(self.graph, form, traced, inputs, order) for form in (None, *forms)]
        batch = len(step.feeds[self.signature.inputs[0].name])
        return OnnxComparison(comparison, files, traced.module, batch, self.compared)

    def placeholders(self, traced: TracedGraph) -> dict[str, Node]:
        """The inputs of the traced graph by the names of the signature's inputs."""
        nodes = traced.module.graph.find_nodes(op="placeholder")
        return {port.name: node for port, node in zip(self.signature.inputs, nodes, strict=True)}

    def full_batch(self, step: Step, pieces: OnnxComparison, traced: TracedGraph) -> None:
        """Compare the operators that compute a full batch in another way."""
        if not any(CHOICE in form.data for form in self.graph.forms.values()):
            return
        batch = self.program.largest_batch
        feeds = self.inputs.samples(step.feeds, batch)
        inputs = self.placeholders(traced)
        by_node = {inputs[name]: value for name, value in feeds.items()}
        pieces.compare_full_batches(self.graph, traced, by_node, batch)

    def formulas(self, step: Step, traced: TracedGraph, by_output: Mapping[int, float]) -> Verdict:
        """The verdict on the traced graph's worst output; it names a wrong decomposition."""
        number = max(by_output, key=by_output.__getitem__)
        output, error = self.signature.outputs[number].name, by_output[number]
        verdict = self.verdict(output, error, TRACED_TOLERANCE)
        if verdict.passed:
            return verdict
        wrong = wrong_decomposition(self.signature, traced.forms, step.feeds, TRACED_TOLERANCE)
        if wrong is None:
            return verdict
        operator, read = wrong
        near = read[0] if read else ""
        return replace(
            verdict,
            output=near or output,
            operator=f"{operator} (its decomposition)",
            place=place_in_source(self.signature, near, operator),
        )

    def operator(self, traced: TracedGraph, found: OperatorError) -> Verdict:
        """The verdict on an operator in the runtime."""
        operator = operator_name(found.node)
        near = nearest_parameter(traced.module, self.signature, found.node)
        return self.verdict(
            near,
            found.error,
            TOLERANCE,
            operator=operator,
            place=place_in_source(self.signature, near, operator),
            form=found.form,
        )

    def verdict(self, output: str, error: float, tolerance: float, **more: Any) -> Verdict:
        """A verdict on `output`; `more` are other attributes of `Verdict`."""
        return Verdict(error, self.signature.name, output, self.seed, tolerance, **more)


def note_shape(shapes: dict[Node, torch.Size], node: Node, known: Values) -> None:
    """Note the shape of the value of `node` in `shapes`, if it is a tensor."""
    if isinstance(known[node], Tensor):
        shapes[node] = known[node].shape
