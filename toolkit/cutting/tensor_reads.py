"""Which tensors of a model the operators on each side of a place read."""

from bisect import bisect_right
from dataclasses import dataclass

from exporters.programs.recorded_graph import module_of
from exporters.recording.captured import Captured
from toolkit.cutting.sample_flow import SampleFlow

NEVER = (-1, -1)


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the model. `training` and `inference`: the first and the last place that read it.

    `changes` says whether training changes it: trained parameters and running statistics.
    """

    training: tuple[int, int]
    inference: tuple[int, int]
    trains: bool
    changes: bool

    def forbids(self, place: int, twin: int) -> bool:
        """Whether no cut is possible after `place`, which is `twin` in the inference graph."""
        frozen = self.training[0] <= place or -1 < self.inference[0] <= twin
        read = self.training[1] > place
        # It would be frozen and trained at once, or read in prediction but not in training.
        return (self.changes and frozen and read) or (self.inference[1] > twin and not read)


class TensorReads:
    """The places at which the two graphs of `captured` read its tensors."""

    def __init__(self, captured: Captured, training: SampleFlow, inference: SampleFlow) -> None:
        updated = {name for node in training.updates for name in training.tensors_read(node)}
        changed = updated | captured.parameters.keys()
        first, second = places_reading(training), places_reading(inference)
        self._tensors = [
            _Tensor(
                first.get(name, NEVER),
                second.get(name, NEVER),
                name in captured.parameters,
                name in changed,
            )
            for name in captured.tensors
        ]
        self._readers: list[tuple[int, str]] = []
        for place, node in enumerate(training.operators):
            # Other buffers, such as frequencies of rotary tables, are no layer's own.
            own = training.tensors_read(node) & (changed | captured.frozen.keys())
            if own:
                self._readers.append((place, module_of(node) or min(own)))

    def are_apart(self, place: int, twin: int) -> bool:
        """Whether the model trains after `place` and no tensor is then frozen and trained at once.

        `twin` is the same place in the inference graph.
        """
        trains = any(one.trains and one.training[1] > place for one in self._tensors)
        return trains and not any(one.forbids(place, twin) for one in self._tensors)

    def module_after(self, place: int) -> str | None:
        """The first module with parameters after `place`; None if all are on one side.

        If the model reads a parameter outside of all modules first, the name of that parameter.
        """
        later = bisect_right(self._readers, place, key=lambda reader: reader[0])
        return self._readers[later][1] if 0 < later < len(self._readers) else None


def places_reading(flow: SampleFlow) -> dict[str, tuple[int, int]]:
    """The first and the last place that read each tensor of the model."""
    found: dict[str, tuple[int, int]] = {}
    for place, node in enumerate(flow.operators):
        for name in flow.tensors_read(node):
            found[name] = found.get(name, (place, place))[0], place
    return found
