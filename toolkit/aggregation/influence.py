"""Estimates how much each update of a round raises or lowers the loss on held-out samples.

A round moves the global model from w to w' = w + sum_p s_p D_p. D_p is the change by update p of
the tensors that its device received, within its limits. s_p is the share of the weight of update p.
The loss L changes by about

    L(w') - L(w) = sum_p A_p,    A_p = s_p <(grad L(w) + grad L(w')) / 2, D_p>

by the trapezoid rule. So A_p, the influence of update p, is its share of the rise of the loss. One
gradient is not enough: at w, the reversed factors of a matrix or large noise may look harmless.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from msgspec import structs
from torch import Tensor

from toolkit.aggregation.aggregation_policy import AggregationPolicy
from toolkit.aggregation.limits.reference import Reference, RoundLimits
from toolkit.aggregation.limits.update_limits import changes, limited_update
from toolkit.aggregation.recover import Received, weight_of
from toolkit.families import recovering_family
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.spec import parse_spec
from toolkit.submodels.tensor_slices import take_slice

Gradient = Mapping[str, Tensor]
"""The gradient of the loss, by the name of a global tensor."""


@dataclass(frozen=True)
class TensorInfluences:
    """The effect of one update if it were the only update.

    Attributes:
        weight: The weight of the update.
        products: The inner product of the gradient with the change, by global tensor.
    """

    weight: float
    products: Mapping[str, float]

    def weakened(self, share: float) -> "TensorInfluences":
        """The influences if only this share of the change counts, because the update is stale."""
        products = {name: share * product for name, product in self.products.items()}
        return TensorInfluences(self.weight, products)


def mean_gradient(one: Gradient, other: Gradient) -> Gradient:
    """The mean of two gradients of the same model. An empty gradient is ignored."""
    if not one or not other:
        return one or other
    return {name: (value + other[name]) / 2 for name, value in one.items()}


def influence(
    update: Received,
    gradient: Gradient,
    model: GlobalModel,
    policy: AggregationPolicy,
    reference: Reference | None,
) -> TensorInfluences:
    """The effect of an update on the loss, for `influences`.

    `check_update` has accepted the update, which was trained from `model`. Its change counts within
    the limits of `reference`; None means no limits.
    """
    samples = update[0].samples
    if reference is not None:
        samples = min(samples, reference.most_samples(update[0].submodel) or samples)
        keeps = recovering_family(parse_spec(update[0].submodel)).averages_factors
        if keeps and policy.factors == "afm":  # factors are limited, not the composed tensor
            update = limited_update(update, RoundLimits(reference), model, policy)
            reference = None
    composed = replace(policy, factors="act")
    products: dict[str, float] = {}
    for change in changes(update, model, composed):
        name = change.tensor
        if name not in gradient:
            continue
        own = gradient[name]
        if change.part is not None:
            own = take_slice(own, change.part.ranges)
        product = (change.new.astype(np.float64) - change.old) * own.numpy()
        if change.rows is not None:
            product = product[list(change.rows)]
        share = 1.0 if reference is None else change.share_within(reference, update[0].steps)
        products[name] = share * float(product.sum())
    record = structs.replace(update[0], samples=samples)
    return TensorInfluences(weight_of(record, model, policy), products)


def influences(updates: Mapping[str, TensorInfluences]) -> dict[str, float]:
    """The influence of each update of a round. A value that is not a number counts as infinite."""
    totals: dict[str, float] = {}
    for own in updates.values():
        for name in own.products:
            totals[name] = totals.get(name, 0.0) + own.weight
    sums = {
        key: sum(own.weight / totals[name] * product for name, product in own.products.items())
        for key, own in updates.items()
    }
    return {key: np.inf if np.isnan(value) else float(value) for key, value in sums.items()}
