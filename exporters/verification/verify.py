"""Verifies the graphs of a program on new random inputs, in three comparisons.

1. The traced graph is compared with PyTorch's autograd, both in float64. This tests the formulas.
2. Each operator in the runtime is compared with the same operator of the traced graph. This tests
   the file and the runtime.
3. Whole steps in the runtime are compared with autograd, with a wide tolerance. This tests the file
   as a device runs it, in each form that this machine's runtime computes.
"""

from collections.abc import Callable, Iterator, Mapping

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
from exporters.verification.double_precision import reference
from exporters.verification.graph_values import Result, leaf, run_graph
from exporters.verification.locations import nearest_parameter, operator_name, place_in_source
from exporters.verification.operators import TOLERANCE, OperatorCheck
from exporters.verification.verdict import Verdict, worst
from exporters.verification.whole_step import Run, errors, run_steps, tolerances

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
) -> Verdict:
    """Compare every signature of a program, as the device's runtime runs it, with PyTorch.

    Args:
        program: The program of a submodel.
        graphs: The graph of every signature of `program`.
        values: Tensors that the bundle stores, by name. Other state starts at random.
        trace: Called to trace a signature again if its graph came from the cache and has no
            `traced`.
        seed: Fixes the random inputs. By default, a new seed is drawn; the verdict names it.

    Returns:
        The verdict on the worst value: the largest error relative to its tolerance.
    """
    if seed is None:
        seed = int(np.random.SeedSequence().generate_state(1)[0])
    generator = torch.Generator().manual_seed(seed)
    return worst(
        verdict
        for signature in program.signatures
        for verdict in SignatureCheck(
            signature, graphs[signature.name], program, generator, seed
        ).verdicts(values, trace)
    )


class SignatureCheck:
    """Makes the three comparisons for one signature and its `graph`."""

    def __init__(
        self,
        signature: ProgramSignature,
        graph: Graph,
        program: Program,
        generator: torch.Generator,
        seed: int,
    ) -> None:
        self.signature, self.graph, self.program = signature, graph, program
        self.generator, self.seed = generator, seed

    def verdicts(self, values: Mapping[str, Tensor], trace: Trace) -> Iterator[Verdict]:
        """Yield the verdicts of all comparisons."""
        right: dict[str, Tensor] = {}
        for form in {blocked_form(block_size() or 0), WINOGRAD}.intersection(self.graph.forms):
            for _, verdict in self.whole_steps(values, right, form):
                yield verdict
        for step, verdict in self.whole_steps(values, right):
            yield verdict
            run = step
        traced = self.graph.traced or trace(self.signature)
        sizes, results = values_of(self.signature, traced, run)
        yield self.formulas(traced, run, results, right)
        right.clear()
        results.clear()
        of_operators = self.operators(traced, run, sizes)
        if of_operators is not None:
            yield of_operators

    def whole_steps(
        self, values: Mapping[str, Tensor], right: dict[str, Tensor], form: str | None = None
    ) -> Iterator[tuple[Run, Verdict]]:
        """Yield each of the consecutive steps with its verdict.

        After each step, `right` holds the outputs that PyTorch computes for this step.
        """
        runs = run_steps(self.signature, self.graph, self.program, values, self.generator, form)
        steps = len(runs)
        # Each run is as large as the model, so it is released as soon as it is compared.
        while runs:
            run = runs.pop(0)
            right.clear()
            right.update(reference(self.signature, run.feeds))
            yield run, self.whole_step(run, right, steps - len(runs), steps)
            run.outputs.clear()

    def whole_step(self, run: Run, right: Mapping[str, Tensor], step: int, steps: int) -> Verdict:
        """The verdict on the worst output of one step."""
        by_output = errors(self.signature, run.outputs, right, run.feeds)
        allowed = tolerances(self.signature, by_output, right, run.feeds, self.generator)
        return worst(
            Verdict(error, self.signature.name, port.name, self.seed, limit, step, steps)
            for port, error, limit in zip(self.signature.outputs, by_output, allowed, strict=True)
        )

    def formulas(
        self,
        traced: TracedGraph,
        run: Run,
        results: Mapping[str, Tensor],
        right: Mapping[str, Tensor],
    ) -> Verdict:
        """The verdict on the traced graph's worst output; it names a wrong decomposition."""
        by_output = errors(self.signature, results, right, run.feeds)
        error, output = max(zip(by_output, [p.name for p in self.signature.outputs], strict=True))
        verdict = Verdict(error, self.signature.name, output, self.seed, TRACED_TOLERANCE)
        if verdict.passed:
            return verdict
        wrong = wrong_decomposition(self.signature, traced.forms, run.feeds, TRACED_TOLERANCE)
        if wrong is None:
            return verdict
        operator, read = wrong
        near = read[0] if read else ""
        return Verdict(
            error,
            self.signature.name,
            near or output,
            self.seed,
            TRACED_TOLERANCE,
            operator=f"{operator} (its decomposition)",
            place=place_in_source(self.signature, near, operator),
        )

    def operators(self, traced: TracedGraph, run: Run, sizes: Mapping[str, int]) -> Verdict | None:
        """The verdict on the worst operator in the runtime; None if no operator can be compared."""
        check = OperatorCheck(self.signature, self.graph, traced, run.feeds, self.generator)
        worst_operator = check.run(sizes)
        if worst_operator is None:
            return None
        operator = operator_name(worst_operator.node)
        near = nearest_parameter(traced.module, self.signature, worst_operator.node)
        return Verdict(
            worst_operator.error,
            self.signature.name,
            near,
            self.seed,
            TOLERANCE,
            operator=operator,
            place=place_in_source(self.signature, near, operator),
        )


def values_of(
    signature: ProgramSignature, traced: TracedGraph, run: Run
) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Run the traced graph in float64 on the inputs of `run`.

    Returns the number of elements of each tensor by its node's name, and the outputs by port.
    """
    sizes: dict[str, int] = {}

    def count(node: Node, result: Result) -> Result:
        if isinstance(result.value, Tensor):
            sizes[node.name] = result.value.numel()
        return leaf(result.value, lambda value: value)  # keeps no reference to its inputs

    inputs = [run.feeds[port.name] for port in signature.inputs]
    outputs = run_graph(traced.module, inputs, count)
    return sizes, {p.name: value for p, value in zip(signature.outputs, outputs, strict=True)}
