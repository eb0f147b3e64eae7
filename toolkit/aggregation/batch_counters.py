"""Batch norm's counters of batches. In a round each advances by the steps of the longest update."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from device_agent.formats.manifest import TensorEntry
from device_agent.formats.update import UpdateRecord
from toolkit.aggregation.update_validation import is_statistic

COUNTER = "num_batches_tracked"
"""The name of batch norm's counter: how many batches its statistics were computed from."""
MOST_BATCHES = 10**9
"""The most batches that a counter may advance by in one round. The counter has 64 bits."""


class BatchCounters:
    """Collects how far each counter of `model` advances in a round. Counters are not averaged.

    Attributes:
        advances: The number of batches by which a counter advances, by its name.
    """

    def __init__(self, model: Mapping[str, Tensor]) -> None:
        self.model = model
        self.advances: dict[str, int] = {}

    def add(self, record: UpdateRecord) -> None:
        """Note how many batches the statistics in an update were computed from."""
        steps = min(max(record.steps, 0), MOST_BATCHES)
        for name in counters_of(record.tensors, self.model):
            self.advances[name] = max(self.advances.get(name, 0), steps)

    def merge(self, other: "BatchCounters") -> None:
        """Add the updates of `other`."""
        for name, count in other.advances.items():
            self.advances[name] = max(self.advances.get(name, 0), count)

    def values(self) -> dict[str, Tensor]:
        """The new values of the counters, by name."""
        return {name: self.model[name] + count for name, count in self.advances.items()}


def counters_of(table: Iterable[TensorEntry], model: Mapping[str, Tensor]) -> set[str]:
    """The counters of `model` that belong to the statistics in `table`."""
    statistics = [e.stands_for for e in table if e.stands_for and is_statistic(e.stands_for)]
    own = {"".join((*name.rpartition(".")[:2], COUNTER)) for name in statistics}
    return {name for name in own if name in model and not model[name].is_floating_point()}
