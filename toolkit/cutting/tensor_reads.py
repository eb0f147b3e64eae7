"""Finds the tensors of a model that the operators on each side of a position read."""

from bisect import bisect_right
from dataclasses import dataclass

from exporters.programs.recorded_graph import module_of
from exporters.recording.captured import Captured
from toolkit.cutting.sample_flow import SampleFlow

NEVER = (-1, -1)


@dataclass(frozen=True)
class _Tensor:
    """The first and last position that read a tensor in the graphs `training` and `inference`.

    `is_updated` says whether training computes its new value without a gradient, as for running
    statistics.
    """

    training: tuple[int, int]
    inference: tuple[int, int]
    is_updated: bool

    def is_read_before(self, position: int, twin: int) -> bool:
        """Whether an operator up to `position` (`twin` in the inference graph) reads the tensor."""
        return -1 < self.training[0] <= position or -1 < self.inference[0] <= twin

    def forbids(self, position: int, twin: int) -> bool:
        """Whether no cut is possible after `position`, which is `twin` in the inference graph."""
        read = self.training[1] > position
        # The tensor would be both fixed and updated, or read in prediction but not in training.
        split = self.is_updated and read and self.is_read_before(position, twin)
        return split or (self.inference[1] > twin and not read)


class TensorReads:
    """The positions at which the two graphs of `captured` read its tensors."""

    def __init__(self, captured: Captured, training: SampleFlow, inference: SampleFlow) -> None:
        updated = {name for node in training.updates for name in training.tensors_read(node)}
        changed = updated | captured.parameters.keys()
        first, second = positions_reading(training), positions_reading(inference)
        self._tensors = {
            name: _Tensor(first.get(name, NEVER), second.get(name, NEVER), name in updated)
            for name in captured.tensors
        }
        self._trained = captured.parameters.keys()
        self._readers: list[tuple[int, str, set[str]]] = []
        for position, node in enumerate(training.operators):
            # Other buffers, such as the frequencies of rotary tables, belong to no layer.
            own = training.tensors_read(node) & (changed | captured.frozen.keys())
            if own:
                self._readers.append((position, module_of(node) or min(own), own))

    def read_before(self, position: int, twin: int) -> set[str]:
        """The trained parameters that are read up to `position`; a later slice keeps them fixed.

        `twin` is the same position in the inference graph.
        """
        return {n for n in self._trained if self._tensors[n].is_read_before(position, twin)}

    def are_apart(self, position: int, twin: int) -> bool:
        """Whether a slice may begin after `position`, which is `twin` in the inference graph.

        The slice must train something. The slice must not begin with a layer whose weights the part
        before `position` also uses. These weights stay fixed, so it is better to record the layer's
        output once than to compute it in every step.
        """
        if any(tensor.forbids(position, twin) for tensor in self._tensors.values()):
            return False
        fixed = self.read_before(position, twin)
        later = self._readers[self._after(position) :]
        again = bool(later) and bool(fixed & later[0][2])
        return not again and any((own & self._trained) - fixed for _, _, own in later)

    def module_after(self, position: int) -> str | None:
        """The first module with parameters after `position`.

        If a parameter outside of all modules is read first, this is the parameter's name. None if
        `position` does not have parameters on both sides.
        """
        later = self._after(position)
        return self._readers[later][1] if 0 < later < len(self._readers) else None

    def _after(self, position: int) -> int:
        """The index of the first reader after `position`."""
        return bisect_right(self._readers, position, key=lambda reader: reader[0])


def positions_reading(flow: SampleFlow) -> dict[str, tuple[int, int]]:
    """Map each tensor of the model to the first and the last position that read it."""
    positions: dict[str, tuple[int, int]] = {}
    for position, node in enumerate(flow.operators):
        for name in flow.tensors_read(node):
            positions[name] = positions.get(name, (position, position))[0], position
    return positions
