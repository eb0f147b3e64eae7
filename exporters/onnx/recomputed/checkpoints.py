"""Keeps few values of the forward pass; the backward pass computes the other values again."""

from collections.abc import Collection, Iterator, Mapping
from itertools import takewhile

import onnx_ir as ir
from onnx import ModelProto
from onnx_ir.passes import InPlacePass, PassResult

from exporters.memory.liveness import Liveness, graph_liveness
from exporters.memory.static_shapes import at_batch, size_of, without_waits
from exporters.onnx.graph_operations import effort
from exporters.onnx.recomputed.cheap_activations import RecomputeActivations
from exporters.onnx.recomputed.forward_pass import ForwardPass, repeat
from exporters.onnx.recomputed.segments import Segments
from exporters.onnx.recomputed.single_values import cheapest_first
from exporters.onnx.state_in_place import update_in_place
from exporters.onnx.torch_translation import separate_outputs
from exporters.programs.program import ProgramSignature, Recomputation
from profiles.cost_model.memory_rule import ONNX
from profiles.errors import ExportError

TRIALS, MOST_TRIALS = 12, 24
"""How many ways to cut the forward pass are tried: those with the smallest estimated peaks.
MOST_TRIALS applies if only memory counts."""
SINGLE_TRIALS, MOST_SINGLE_TRIALS = 4, 8
"""How many sets of single values are tried. MOST_SINGLE_TRIALS applies if only memory counts."""
WORK_WEIGHT = 1.8
"""One per cent more work must save at least this many per cent of memory. With a weight of 1, the
steps of `make bench-step` took 2% more time in the median than the goal allows, and less memory
than the goal of `make bench-memory`."""
ENOUGH = 1.02
"""A figure is nearly the smallest if it is at most the smallest times this."""
LEAST_BYTES = 4 << 20
"""Unless only memory counts, steps that keep fewer bytes than this for the backward pass are not
changed: the change would save little, and the search takes time."""


class KeepCheckpoints(InPlacePass):
    """Repeats parts of the forward pass so that few values stay alive until the backward pass.

    Before: each value is computed once.

    After: nodes behind the forward pass read second copies of the chosen values. Results do not
    change, because a copy computes the same value from the same inputs.

    In the file, the node of a copy follows the original node directly. The copy still runs late,
    when the backward pass has reached it. The reason is that ONNX Runtime does not follow the order
    of the file: it starts from the outputs, and visits the last inputs of each node first.

    If no copy saves enough memory for the additional work, or if a size is not known, the graph
    does not change.
    """

    def __init__(self, signature: ProgramSignature, wanted: Recomputation) -> None:
        """Take the signature of the graph, which is a training step."""
        super().__init__()
        self.signature, self.wanted = signature, wanted

    def call(self, model: ir.Model) -> PassResult:
        """Let the nodes behind the forward pass of `model` read copies of chosen values."""
        forward = ForwardPass(model.graph, metrics_of(self.signature))
        work_counts = self.wanted.most_work is not None
        if work_counts and forward.kept_bytes(self.wanted.batch) < LEAST_BYTES:
            return PassResult(model, modified=False)
        try:
            names = Search(ir.to_proto(model), self.signature, self.wanted).best()
        except ExportError:  # a size depends on the data
            names = frozenset()
        repeat(forward, names)
        return PassResult(model, bool(names))


def metrics_of(signature: ProgramSignature) -> list[str]:
    """The names of the outputs that end the forward pass of a training step."""
    return [port.name for port in signature.outputs if port.kind == "metric"]


class Search:
    """Searches for the values that a training step should compute twice.

    In this class, a peak is a number of bytes: the planned tensors (see
    `exporters/memory/liveness.py`) plus the session's memory for each node. A peak is for batches
    of `wanted.batch` samples.
    """

    def __init__(
        self, model: ModelProto, signature: ProgramSignature, wanted: Recomputation
    ) -> None:
        """Take the graph of `signature`.

        Raises ExportError if the size of a value does not follow from the batch.
        """
        self.signature, self.metrics = signature, metrics_of(signature)
        self.most_work = wanted.most_work
        self.sized = at_batch(model, wanted.batch)
        graph = self.sized.graph
        separate_outputs(graph, [port.name for port in signature.outputs])
        self.inputs = sum(map(size_of, graph.inputs))
        self.work = sum(map(effort, graph))
        self.forward = ForwardPass(graph, self.metrics)
        self.segments = Segments(self.forward)

    def best(self) -> frozenset[str]:
        """Return the names of the values to compute twice; empty if this saves too little memory.

        If the work is limited (`wanted.most_work`), the result is the set with the smallest cost.
        The cost is the peak divided by the memory of the process, plus `WORK_WEIGHT` times the
        share of the step's work that is repeated. If the work is not limited, only sets with nearly
        the smallest peak are considered. Among these sets, the result is the first set that repeats
        nearly the least work.
        """
        nodes, alive = self.liveness(())
        least = peak_of(nodes, alive)
        peaks = {frozenset[str](): least}
        for names in self.candidates(alive):
            peaks[names] = peak_of(*self.liveness(names))
        if self.most_work is not None:
            process = least + self.inputs + ONNX.session_bytes
            costs = {n: peaks[n] / process + WORK_WEIGHT * self.share(n) for n in peaks}
            return min(peaks, key=lambda names: (costs[names], sorted(names)))
        fitting = near_least(peaks)
        return next(iter(near_least({names: self.share(names) for names in fitting})))

    def candidates(self, alive: Liveness) -> Iterator[frozenset[str]]:
        """Yield sets of values to try; `alive` is the liveness if no value is computed twice."""
        trials, parts, most = TRIALS, SINGLE_TRIALS, self.most_work
        if most is None:
            trials, parts = MOST_TRIALS, MOST_SINGLE_TRIALS
            most = self.share([value.name or "" for value in self.forward.values]) or 1.0
        peaks = self.segments.repeated()
        ordered = sorted(peaks, key=lambda names: (peaks[names], sorted(names)))
        yield from [names for names in ordered if self.share(names) <= most][:trials]
        sets = takewhile(
            lambda names: self.share(names) <= most, cheapest_first(self.forward, alive.at_peak())
        )
        # Divide the work that may be repeated into parts, and try the largest set in each part.
        yield from {int(parts * self.share(names) / most): names for names in sets}.values()

    def liveness(self, names: Collection[str]) -> tuple[int, Liveness]:
        """The number of nodes and the liveness of the graph if `names` are computed twice."""
        model = self.sized.clone()  # a trial changes its graph
        repeat(ForwardPass(model.graph, self.metrics), names)
        for metric in self.metrics:
            RecomputeActivations(metric)(model)
        overwritten = update_in_place(model, self.signature)
        nodes = len(model.graph)
        return nodes, graph_liveness(without_waits(model).graph, overwritten)

    def share(self, names: Collection[str]) -> float:
        """The share of the step's work that is repeated if `names` are computed twice."""
        again = {node for node in self.forward.nodes for v in node.outputs if v.name in names}
        return sum(self.forward.efforts[node] for node in again) / self.work


def peak_of(nodes: int, alive: Liveness) -> int:
    """The bytes of planned tensors, without inputs, plus the session's bytes for `nodes` nodes."""
    return ONNX.node_bytes * nodes + alive.planned


def near_least(figures: Mapping[frozenset[str], float]) -> list[frozenset[str]]:
    """Return the keys with nearly the smallest figures (see `ENOUGH`). Keeps their order."""
    limit = ENOUGH * min(figures.values())
    return [names for names, figure in figures.items() if figure <= limit]
