"""Cut points of a captured model, and the parts on both sides of them.

A cut point is a position in the execution order of the operators. Each value that is computed
before this position and needed after it is recorded: one or several activations.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from device_agent.formats.manifest import RecordedDtype
from exporters.programs.recorded_graph import (
    attributes_read,
    input_node,
    keeps_new_value,
    module_of,
    output_node,
    writes_in_place,
)
from exporters.recording.captured import Captured
from profiles.errors import ModelError
from toolkit.cutting.matching_operators import Matching
from toolkit.cutting.sample_flow import SampleFlow
from toolkit.cutting.slice_loads import load_of, loads_after
from toolkit.cutting.subgraph import EXACT, make_subgraph
from toolkit.cutting.tensor_reads import TensorReads
from toolkit.submodels.capacity import count_activations, count_elements, count_parameters


@dataclass(frozen=True)
class CutPoint:
    """A position at which a model can be cut.

    Attributes:
        position: Index of the last operator before the cut, among `SampleFlow.operators`.
        nodes: The operators whose values are recorded, in order of execution.
        module: The first module with parameters after the cut. If the model first reads a parameter
            outside of all modules, this is the parameter's name.
    """

    position: int
    nodes: tuple[Node, ...]
    module: str

    @property
    def recorded(self) -> int:
        """The number of elements that are recorded for one sample."""
        return sum(count_elements(node, 1) for node in self.nodes)


def smallest_recording(points: Iterable[CutPoint]) -> CutPoint:
    """The cut point that records the fewest numbers. If several are equal, the last."""
    return min(points, key=lambda point: (point.recorded, -point.position))


class Cutter:
    """Cuts the training and the inference graph of a captured model at the same positions.

    A position is the index of an operator among `training.operators`; -1 stands for the samples.

    Attributes:
        captured: The model.
        recording: Type of the recorded numbers.
        training: The operators of the training graph.
        inference: The operators of the inference graph.
        end: The position of the last operator.
        points: All useful cut points from the input to the output, without the two ends.
    """

    def __init__(self, captured: Captured, recording: RecordedDtype = "float32") -> None:
        """Find the cut points of `captured` for recordings of the type `recording`.

        Raises ModelError if an operator writes in place, so that values cannot be recorded.
        """
        self.captured, self.recording = captured, recording
        self.training = SampleFlow(captured.training)
        self.inference = SampleFlow(captured.inference)
        writing = next(
            (n for n in self.training.operators if writes_in_place(n) and not keeps_new_value(n)),
            None,
        )
        if writing is not None:
            raise ModelError(
                "The model writes in place ({operator} in {module!r}), so the values at a cut are "
                "unknown and the model cannot be sliced. Use the operator that returns a new "
                "tensor.",
                code="model.cannot-slice",
                operator=str(writing.target),
                module=module_of(writing),
            )
        self.end = len(self.training.operators) - 1
        self._crossings = list(self.training.crossings())
        self._match = Matching(self.training, self.inference)
        # The first position after which the prediction graph needs the same values.
        self._positions: dict[frozenset[Node], int] = {}
        for position, nodes in enumerate(self.inference.crossings()):
            self._positions.setdefault(self._unchanged(nodes), position)
        self._reads = TensorReads(captured, self.training, self.inference)
        self.points = list(self._find_points())

    def _unchanged(self, nodes: Iterable[Node]) -> frozenset[Node]:
        """The operators that compute the values of `nodes`, without copies and random masks."""
        return frozenset(map(self._match.unchanged, nodes))

    def _find_points(self) -> Iterator[CutPoint]:
        """Yield the useful cut points.

        These have parameters on both sides, and values to record.
        """
        before: frozenset[Node] = frozenset()
        for position in range(self.end):
            nodes, twin = self.crossing(position), self._position_in_prediction(position)
            values = self._unchanged(nodes)
            # After a copy or a random mask, the values are those of the previous point.
            repeated, before = values == before or len(values) < len(nodes), values
            module = self._reads.module_after(position)
            if repeated or twin is None or module is None:
                continue
            if all(map(self._is_recordable, nodes)) and self._reads.are_apart(position, twin):
                yield CutPoint(position, nodes, module)

    def _is_recordable(self, node: Node) -> bool:
        """Whether the value of `node` can be recorded as numbers of each sample."""
        value = node.meta["val"]
        if not isinstance(value, Tensor) or self.training.sample_axis(node) is None:
            return False
        limit, exact = self.captured.sample_limit, EXACT[self.recording]
        if node.op == "placeholder" and not value.is_floating_point():
            return limit is not None and limit <= exact
        if self.captured.input_range and node in self.training.of_samples:
            # Random recordings are in range if they hold whole samples. Values computed from the
            # samples may be recorded if they can be any numbers.
            bounded = [i for i in self.captured.input_range if i.low is not None]
            if node.op != "placeholder" and (
                node in self.training.ids or not all(interval.whole for interval in bounded)
            ):
                return False
            return all(max(abs(i.low or 0), abs(i.high or 0)) <= exact for i in bounded if i.whole)
        return value.dtype == torch.float32

    def _position_in_prediction(self, position: int) -> int | None:
        """The position in the inference graph that matches `position`; None if there is none.

        After both positions, the same values are needed.
        """
        if position in (-1, self.end):
            return -1 if position < 0 else len(self.inference.operators) - 1
        matches = [self._match(node) for node in self.crossing(position)]
        return self._positions.get(frozenset(n for n in matches if n)) if all(matches) else None

    def crossing(self, position: int) -> tuple[Node, ...]:
        """The operators of the training graph whose values are needed after `position`."""
        return self._crossings[position] if position >= 0 else (input_node(self.captured.training),)

    def _crossing_in_prediction(self, position: int) -> tuple[Node, ...]:
        """The operators of the inference graph that match the operators in `crossing`, in order."""
        if position == self.end:
            return (output_node(self.captured.inference),)
        matches = [match for node in self.crossing(position) if (match := self._match(node))]
        if self._position_in_prediction(position) is None:
            raise ModelError(
                "The model runs different operators in training and in prediction, so this cut is "
                "not possible in both graphs. Cut the model elsewhere.",
                code="model.cannot-slice",
            )
        return tuple(matches)

    def trained(self, after: int) -> GraphModule:
        """The training graph of the operators after position `after`."""
        positions = self.training.position
        return make_subgraph(
            self.training,
            self.crossing(after),
            self.crossing(self.end),
            [node for node in self.training.updates if positions.get(node, self.end) > after],
            self.captured.sample_limit,
        )

    def predicting(self, after: int) -> GraphModule:
        """The inference graph of the operators after position `after`."""
        return self.frozen(after, self.end)

    def frozen(self, after: int, upto: int) -> GraphModule:
        """The inference graph of the operators between two positions."""
        sources, targets = map(self._crossing_in_prediction, (after, upto))
        return make_subgraph(self.inference, sources, targets, limit=self.captured.sample_limit)

    def fixed_after(self, position: int) -> set[str]:
        """The trained parameters that a slice after `position` reads but does not change.

        The part before `position` also reads them, so a change would make its recording invalid.
        """
        twin = self._position_in_prediction(position)
        assert twin is not None
        return self._reads.read_before(position, twin) & set(tensors_read([self.trained(position)]))

    def load(self, part: GraphModule, batch: int) -> int:
        """The load of `part`: the number of its trained parameters and activations.

        The capacity of a part is its load divided by the load of the whole model.
        """
        return count_parameters(part, self.captured.parameters) + count_activations(part, batch)

    def loads(self, batch: int) -> list[int]:
        """For each position, count the load of the operators after it, without building graphs."""
        return loads_after(self.training, self.captured.parameters, batch)

    def points_by_module(self, batch: int) -> dict[str, CutPoint]:
        """Map each MODULE that `slice:MODULE` can name to its cut point, in order of execution."""
        loads = self.loads(batch)
        points: dict[str, list[CutPoint]] = {}
        for point in self.points:
            same = points.setdefault(point.module, [])
            # Later points may leave out the first of several parameters of the module.
            if not same or loads[point.position] == loads[same[0].position]:
                same.append(point)
        return {module: smallest_recording(same) for module, same in points.items()}

    def stages(self, upto: int, limit: int, batch: int) -> list[GraphModule]:
        """Divide the operators up to position `upto` into as few stages as possible.

        Args:
            upto: Index of the last operator; -1 for no stages.
            limit: The largest number of parameters plus activations of a stage. A stage may exceed
                this limit, because operators between two neighbouring cut points cannot be
                separated.
            batch: Samples in a batch.
        """
        if upto < 0:
            return []
        ends = list(self._stage_ends(upto, limit, batch))
        bounds = [-1]
        for position, following in zip(ends, [*ends[1:], None], strict=True):
            # Close the stage here if it would grow beyond the limit with the next stretch.
            if following is None or self._stage_load(bounds[-1], following, batch) > limit:
                bounds.append(position)
        return [self.frozen(a, b) for a, b in pairwise(bounds)]

    def _stage_ends(self, upto: int, limit: int, batch: int) -> Iterator[int]:
        """The positions where a stage may end, up to `upto`.

        A stage ends at a point with several tensors only if the stage would otherwise exceed the
        limit.
        """
        points = [point for point in self.points if point.position < upto]
        previous = -1
        for end in [*(p.position for p in points if len(p.nodes) == 1), upto]:
            if self._stage_load(previous, end, batch) > limit:
                yield from (p.position for p in points if previous < p.position < end)
            yield end
            previous = end

    def _stage_load(self, after: int, upto: int, batch: int) -> int:
        """All parameters, also frozen ones, plus activations of the operators between positions."""
        first, last = self._position_in_prediction(after), self._position_in_prediction(upto)
        assert first is not None
        assert last is not None
        parameters = {**self.captured.parameters, **self.captured.frozen}
        operators = self.inference.operators[first + 1 : last + 1]
        return load_of(operators, self.inference, parameters, batch)


def tensors_read(parts: Sequence[GraphModule]) -> list[str]:
    """Names of all tensors that `parts` read, each once."""
    return list(dict.fromkeys(name for part in parts for name in attributes_read(part)))
