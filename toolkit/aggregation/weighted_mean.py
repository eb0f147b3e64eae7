"""The streaming weighted mean of tensors, element by element over those who hold them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from toolkit.aggregation.running_sum import RunningSum
from toolkit.submodels.matrix_product import Product
from toolkit.submodels.tensor_slices import TensorSlice


@dataclass
class Mean:
    """Streaming weighted mean, tensor by tensor over those that were added.

    Laws: the result does not depend on the order of `add`, and merging two means equals adding
    everything to one. Holds two float32 copies of what was added, however many there were, and
    one number for every place that somebody's tensors had.
    """

    sums: dict[str, RunningSum] = field(default_factory=dict)
    weights: dict[str, dict[TensorSlice | None, float]] = field(default_factory=dict)

    def add(
        self,
        tensors: Mapping[str, Tensor | Product],
        weight: float,
        places: Mapping[str, TensorSlice] | None = None,
    ) -> None:
        """Take in `tensors` with `weight` > 0; those in `places` are parts of larger ones."""
        for name, value in tensors.items():
            place = (places or {}).get(name)
            if name not in self.sums:
                self.sums[name] = sum_for(value, place)
            self.sums[name].add(value, weight, place)
            self._weigh(name, place, weight)

    def merge(self, other: "Mean") -> None:
        """Take in all that `other` took in."""
        for name, total in other.sums.items():
            if name not in self.sums:
                self.sums[name] = RunningSum(tuple(total.low.shape), total.axes)
            self.sums[name].merge(total)
            for place, weight in other.weights[name].items():
                self._weigh(name, place, weight)

    def result(self) -> dict[str, Tensor]:
        """The means so far, float32; nan where nobody holds an element."""
        return {
            name: (total.total() / self._share(name)).float() for name, total in self.sums.items()
        }

    def take(self, name: str, old: Tensor) -> Tensor:
        """The mean of one tensor, float32, which is then forgotten.

        Elements that nobody holds are those of `old`.
        """
        share = self._share(name)
        del self.weights[name]
        means = self.sums.pop(name).take().div_(share)
        return torch.where(share > 0, means, old) if isinstance(share, Tensor) else means

    def _weigh(self, name: str, place: TensorSlice | None, weight: float) -> None:
        weights = self.weights.setdefault(name, {})
        weights[place] = weights.get(place, 0.0) + weight

    def _share(self, name: str) -> float | Tensor:
        """Joint weight of those who hold each element; one number where all hold all of it."""
        weights = dict(self.weights[name])
        whole = weights.pop(None, 0.0)
        if not weights:
            return whole
        share = torch.full(self.sums[name].low.shape, whole, dtype=torch.float64)
        for place, weight in weights.items():
            assert place is not None
            place.add_to(share, 1.0, weight)
        return share


def sum_for(value: Tensor | Product, place: TensorSlice | None) -> RunningSum:
    """An empty sum for what is like `value`, lying as it does."""
    if place is not None:
        return RunningSum(place.whole_shape)
    return RunningSum(tuple(value.shape), value.axes if isinstance(value, Product) else None)
