"""The streaming weighted mean. Each element is averaged over the updates that contain it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from toolkit.aggregation.running_sum import RunningSum
from toolkit.submodels.matrix_product import Product
from toolkit.submodels.tensor_slices import TensorSlice


@dataclass
class Mean:
    """The streaming weighted mean of the values that were added for each tensor.

    Laws: the result does not depend on the order of `add`, and merging two means equals adding
    everything to one mean. The mean of equal values is exactly that value. The memory does not grow
    with the number of additions: one float64 copy of each tensor, and one weight for each slice.
    """

    sums: dict[str, RunningSum] = field(default_factory=dict)
    weights: dict[str, dict[TensorSlice | None, float]] = field(default_factory=dict)

    def add(
        self,
        tensors: Mapping[str, Tensor | Product],
        weight: float,
        places: Mapping[str, TensorSlice] | None = None,
    ) -> None:
        """Add `tensors` with `weight` > 0. If a tensor is only a part, `places` has its slice."""
        for name, value in tensors.items():
            part = (places or {}).get(name)
            if name not in self.sums:
                shape = tuple(value.shape) if part is None else part.whole_shape
                self.sums[name] = RunningSum(shape)
            self.sums[name].add(value, weight, part)
            self._weigh(name, part, weight)

    def merge(self, other: "Mean") -> None:
        """Add everything that was added to `other`."""
        for name, total in other.sums.items():
            if name not in self.sums:
                self.sums[name] = RunningSum(tuple(total.total.shape))
            self.sums[name].merge(total)
            for part, weight in other.weights[name].items():
                self._weigh(name, part, weight)

    def result(self) -> dict[str, Tensor]:
        """The means so far, float32; nan for elements that no update contains."""
        return {name: (total.total / self.share(name)).float() for name, total in self.sums.items()}

    def take(self, name: str, old: Tensor) -> Tensor:
        """Remove the mean of one tensor and return it, float32.

        Elements that no update contains have the value of `old`.
        """
        share = self.share(name)
        del self.weights[name]
        means = self.sums.pop(name).total.div_(share).float()
        return torch.where(share > 0, means, old) if isinstance(share, Tensor) else means

    def replace(self, name: str, means: Tensor) -> None:
        """Use the numbers in `means` that are not NaN as the mean of the tensor `name`."""
        total = self.sums[name].total
        total.copy_(torch.where(means.isnan(), total, means * self.share(name)))

    def share(self, name: str) -> float | Tensor:
        """The sum of the weights of each element; one number if only whole tensors were added."""
        weights = dict(self.weights[name])
        whole = weights.pop(None, 0.0)
        if not weights:
            return whole
        share = torch.full(self.sums[name].total.shape, whole, dtype=torch.float64)
        for part, weight in weights.items():
            assert part is not None
            part.add_to(share, 1.0, weight)
        return share

    def _weigh(self, name: str, part: TensorSlice | None, weight: float) -> None:
        weights = self.weights.setdefault(name, {})
        weights[part] = weights.get(part, 0.0) + weight
