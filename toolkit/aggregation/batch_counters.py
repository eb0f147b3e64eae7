"""Computes how far batch norm's counters of batches advance in a round.

Each counter advances by the training steps of the update with the most steps.
"""

from collections.abc import Iterable, Mapping

from torch import Tensor

from device_agent.formats.manifest import TensorEntry
from device_agent.formats.update import UpdateRecord
from toolkit.aggregation.update_validation import is_statistic

COUNTER = "num_batches_tracked"
"""The name of batch norm's counter. It counts the batches behind the statistics."""
MOST_BATCHES = 10**9
"""The most batches that a counter may advance by in one round. The counter has 64 bits."""


class BatchCounters:
    """Collects how far each counter of `model` advances in a round. Counters are not averaged.

    Attributes:
        advances: Maps the name of a counter to the number of batches by which it advances.
    """

    def __init__(self, model: Mapping[str, Tensor]) -> None:
        self.model = model
        self.advances: dict[str, int] = {}

    def add(self, record: UpdateRecord) -> None:
        """Record the number of batches from which an update computed its batch norm statistics."""
        steps = min(max(record.steps, 0), MOST_BATCHES)
        for name in counters_of(record.tensors, self.model):
            self.advances[name] = max(self.advances.get(name, 0), steps)

    def merge(self, other: "BatchCounters") -> None:
        """Add all updates that were added to `other`."""
        for name, count in other.advances.items():
            self.advances[name] = max(self.advances.get(name, 0), count)

    def values(self) -> dict[str, Tensor]:
        """The new values of the counters, by name."""
        return {name: self.model[name] + count for name, count in self.advances.items()}


def counters_of(table: Iterable[TensorEntry], model: Mapping[str, Tensor]) -> set[str]:
    """The names of the counters in `model` that belong to the batch norm statistics in `table`."""
    statistics = [e.stands_for for e in table if e.stands_for and is_statistic(e.stands_for)]
    own = {"".join((*name.rpartition(".")[:2], COUNTER)) for name in statistics}
    return {name for name in own if name in model and not model[name].is_floating_point()}
