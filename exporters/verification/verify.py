"""Verifies the graphs of a program on new random inputs, in three comparisons.

1. The traced graph is compared with PyTorch's autograd. Both compute in float64. This tests the
  formulas.
2. Each operator in the runtime is compared with the same operator of the traced graph. This tests
   the file and the runtime.
3. Whole steps in the runtime are compared with autograd, with a wide tolerance. This tests the file
  under the conditions of a device. Each other form that this machine's runtime supports is compared
  with the plain graph.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node

from device_agent.formats.graph_forms import WINOGRAD, blocked_form
from device_agent.runtime.blocked_probe import block_size
from device_agent.system.process_memory import release_unused
from exporters.programs.program import Program, ProgramSignature
from exporters.programs.tracing import DTYPES, TracedGraph
from exporters.runtime_graph import Graph, Graphs
from exporters.verification.decomposition_check import wrong_decomposition
from exporters.verification.expected_outputs import ExpectedOutputs
from exporters.verification.graph_values import LazyOutputs, Values, by_effort, computes_tensor
from exporters.verification.locations import nearest_parameter, operator_name, place_in_source
from exporters.verification.onnx_operators import ComparedFile, FullBatch, OnnxComparison
from exporters.verification.operators import (
    TOLERANCE,
    Comparison,
    OperatorError,
    compare_exposed,
)
from exporters.verification.verdict import Verdict, worst
from exporters.verification.whole_step import (
    BATCHES,
    ExampleInputs,
    Output,
    Step,
    Tensors,
    errors,
    numbered,
    output_error,
    run,
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
    """Compare every signature of a program in the device's runtime with PyTorch.

    Args:
        program: The program of a submodel.
        graphs: The graph of every signature of `program`.
        values: Tensors that the bundle stores, by name. Other state starts with random values.
        trace: Traces a signature again. This is needed if its graph came from the cache and has no
            `traced`.
        seed: The seed of the random inputs. By default, a new seed is drawn, and the verdict names
            it.
        compared: The operators of ONNX graphs that earlier calls found to be correct; see
            `OnnxComparison`. They are not compared again. Newly compared operators are added.

    Returns:
        The verdict on the worst value, which has the largest error relative to its tolerance.
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
        order = by_effort(traced.module)
        expected = ExpectedOutputs(self.signature, order)
        for step in self.steps():
            if step.number == 1:  # operators are compared for the samples of the last step
                for form in forms:
                    yield self.form(step, form)
            if step.number < step.steps:
                right = expected.of(step.feeds)
                by_output = errors(self.signature, step.outputs, right, step.feeds)
                release_unused()
                verdict = self.whole_step(step, by_output, expected.of)
                yield verdict
                if not verdict.passed:
                    break  # the next step would start from a wrong state, which may hide the fault
                del step  # the next step needs its memory
        lazy = LazyOutputs(traced.module, order)
        yield from self.last_step(step, traced, forms, lazy, expected)

    def steps(self) -> Iterator[Step]:
        """Run and yield consecutive steps of the graph."""
        batches = BATCHES if self.signature.trains else BATCHES[-1:]
        feeds, outputs = self.inputs.first(batches[0]), dict[str, Tensor]()
        for number, batch in enumerate(batches, 1):
            if number > 1:
                feeds = self.inputs.after(outputs, feeds, batch)
            outputs = run(self.signature, self.graph, feeds)
            slower = self.inputs.slower(feeds, outputs) if number == 1 else None
            if slower is not None:
                feeds, outputs = slower, run(self.signature, self.graph, slower)
            yield Step(feeds, outputs, number, len(batches), batch)

    def form(self, step: Step, form: str) -> Verdict:
        """The verdict on the step of a form, compared with the step of the plain graph."""
        outputs = run(self.signature, self.graph, step.feeds, form)
        right = numbered(self.signature, step.outputs)
        by_output = errors(self.signature, outputs, right, step.feeds)
        return self.whole_step(step, by_output, self.plain_outputs, form)

    def plain_outputs(self, feeds: Tensors) -> list[Output]:
        """The outputs of the plain graph."""
        return numbered(self.signature, run(self.signature, self.graph, feeds))

    def whole_step(
        self,
        step: Step,
        by_output: Mapping[int, float],
        right: Callable[[Tensors], Iterable[Output]],
        form: str | None = None,
    ) -> Verdict:
        """The verdict on the worst output of one step.

        Args:
            step: The step.
            by_output: The error of each output.
            right: Computes the correct outputs for given inputs.
            form: The form of the graph that ran. None for the plain graph.
        """
        allowed = tolerances(self.signature, by_output, right, step.feeds, self.generator)
        return worst(
            self.verdict(
                self.signature.outputs[number].name,
                measured,
                allowed[number],
                step=step.number,
                steps=step.steps,
                form=form,
            )
            for number, measured in by_output.items()
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
        rights = expected.of(step.feeds)
        # Each output is released once it is compared: together they are as large as two models.
        # `zip` would keep both values of an output while the next ones are computed.
        for number, value in computed:
            _, right = next(rights)
            output, before = self.signature.outputs[number], step.feeds
            by_output[number] = output_error(output, step.outputs.pop(output.name), right, before)
            formulas[number] = output_error(output, value, right, before)
            del value, right
        yield self.whole_step(step, by_output, expected.of)
        yield self.formulas(step, traced, formulas)
        if pieces is None:
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
        nodes = traced.module.graph.find_nodes(op="placeholder")
        inputs = {p.name: node for p, node in zip(self.signature.inputs, nodes, strict=True)}
        order = {node: n for n, node in enumerate(filter(computes_tensor, lazy.nodes))}
        full = FullBatch(self.program.largest_batch, step.batch, partial(self.shapes, lazy))
        files = [
            ComparedFile(self.graph, form, traced, inputs, order, full) for form in (None, *forms)
        ]
        return OnnxComparison(comparison, files, traced.module, step.batch, full, self.compared)

    def shapes(self, lazy: LazyOutputs, batch: int) -> dict[Node, torch.Size]:
        """The shapes of all tensors in the traced graph for this number of samples."""
        shapes = dict[Node, torch.Size]()
        with FakeTensorMode(allow_non_fake_inputs=True):
            inputs = [
                torch.empty(
                    [batch if size is None else size for size in port.shape],
                    dtype=DTYPES[port.dtype],
                )
                for port in self.signature.inputs
            ]
            for _ in lazy.run(inputs, partial(note_shape, shapes)):
                pass
        nodes = lazy.module.graph.find_nodes(op="placeholder")
        return shapes | {node: x.shape for node, x in zip(nodes, inputs, strict=True)}

    def formulas(self, step: Step, traced: TracedGraph, by_output: Mapping[int, float]) -> Verdict:
        """The verdict on the traced graph's worst output. It names a wrong decomposition."""
        number = max(by_output, key=by_output.__getitem__)
        output = self.signature.outputs[number].name
        verdict = self.verdict(output, by_output[number], TRACED_TOLERANCE)
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
        """A verdict on `output`. `more` are other attributes of `Verdict`."""
        return Verdict(error, self.signature.name, output, self.seed, tolerance, **more)


def note_shape(shapes: dict[Node, torch.Size], node: Node, known: Values) -> None:
    """If the value of `node` is a tensor, store its shape in `shapes`."""
    if isinstance(known[node], Tensor):
        shapes[node] = known[node].shape
