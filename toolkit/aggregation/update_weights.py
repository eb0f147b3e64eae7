"""The sum of the weights of updates, also for rows that belong to single classes."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class UpdateWeights:
    """The sum of the weights of updates. Some updates have only the rows of some classes.

    Attributes:
        total: The sum of the weights of all updates.
        by_class: Maps a class to the sum over the updates whose devices listed this class. The key
            None has the sum over the updates with all classes.
    """

    total: float = 0.0
    by_class: dict[int | None, float] = field(default_factory=dict)

    def add(self, other: "UpdateWeights", scale: float = 1.0) -> None:
        """Add `scale` times the weights of `other`."""
        self.total += scale * other.total
        for label, more in other.by_class.items():
            self.by_class[label] = self.by_class.get(label, 0.0) + scale * more

    @property
    def differ(self) -> bool:
        """Whether rows of different classes may have different weights."""
        return any(label is not None for label in self.by_class)

    def of_rows(self, rows: int) -> Tensor:
        """The weight of each row, (rows,) in float64, where row i belongs to class i."""
        weights = torch.full((rows,), self.by_class.get(None, 0.0), dtype=torch.float64)
        for label, weight in self.by_class.items():
            if label is not None:
                weights[label] += weight
        return weights
