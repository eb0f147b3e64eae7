"""Dropout whose masks follow from a number that the device feeds to each step.

Runtimes draw random numbers each in their own way, or not at all. Here a mask is a hash of the
seed, of the dropout's place in the model and of the element's: integer arithmetic, which gives the
same mask everywhere.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from exporters.decompositions.attention import masked_scores, shared, weights

aten = torch.ops.aten
PRIME = 2**31 - 1
HALF = 2**30
STEP = 1_103_515_245
"""Of the congruential generator in ISO C's example of rand()."""
SCALED_ATTENTION = aten.scaled_dot_product_attention.default
SEEDED = {aten.dropout.default: 1, aten.feature_dropout.default: 1, SCALED_ATTENTION: 4}
"""Operators whose dropout is seeded, and the place of its probability among their arguments."""


def mixed(values: Tensor, offset: Tensor | int) -> Tensor:
    """h(STEP v + offset) with h two rounds of z -> z^2 + constant modulo PRIME, in 0 .. PRIME - 1.

    No intermediate exceeds 2^63 for 0 <= `values`, `offset` < 2^31.
    """
    z = (values * STEP + offset) % PRIME
    z = (z * z + 12345) % PRIME
    return (z * z + 67890) % PRIME


def keep(shape: Any, rate: float, seed: Tensor, site: int) -> Tensor:
    """Which elements of a tensor of `shape` stay: each with probability 1 - `rate`, booleans.

    `seed` is an int64 scalar from 0 below PRIME, `site` the dropout's number in the model. Element
    (i, j) of the matrix with the first axis as rows: (u_i + v_j)^2 modulo PRIME against `rate`.
    """
    rows, columns = shape[0], math.prod(shape[1:])
    start = mixed(seed, 2 * site + 1)
    u = mixed(torch.arange(rows), start) % HALF
    v = mixed(torch.arange(columns), mixed(start, 2 * site + 2)) % HALF
    z = u.unsqueeze(1) + v
    return ((z * z) % PRIME >= round(rate * PRIME)).reshape(shape)


def drop(x: Tensor, rate: float, kept: Tensor) -> Tensor:
    """x / (1 - rate) where `kept`, else 0."""
    return torch.where(kept, x * (1 / (1 - rate) if rate < 1 else 0.0), 0.0)


def drops(graph: GraphModule) -> bool:
    """Whether the recorded `graph` has a dropout that `SeededDropout` makes depend on a seed."""
    return any(
        node.target in SEEDED and rate_of(node.target, node.args) > 0 for node in graph.graph.nodes
    )


def rate_of(operator: Any, args: tuple[Any, ...]) -> float:
    """The probability of the dropout in `operator`, 0 where it only predicts."""
    place = SEEDED[operator]
    rate = float(args[place]) if len(args) > place else 0.0
    return rate if operator is SCALED_ATTENTION or args[2] else 0.0


class SeededDropout(TorchFunctionMode):
    """While this is open, dropouts of a recorded graph take their masks from `seed`, in order."""

    def __init__(self, seed: Tensor) -> None:
        super().__init__()
        self.seed, self.site = seed, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Replace dropouts; leave the rest."""
        rate = rate_of(func, args) if func in SEEDED else 0.0
        if rate == 0:
            return func(*args, **(kwargs or {}))
        if func is SCALED_ATTENTION:
            return self.attention(*args, **(kwargs or {}))
        x: Tensor = args[0]
        whole = func is aten.dropout.default
        shape = x.shape if whole else (*x.shape[:2], *[1] * (x.dim() - 2))
        return drop(x, rate, self.mask(shape, rate))

    def mask(self, shape: Any, rate: float) -> Tensor:
        """What the next dropout keeps."""
        self.site += 1
        return keep(shape, rate, self.seed, self.site)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        rate: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """drop(P) V with P = softmax(s Q K^T + mask)."""
        if enable_gqa:
            key, value = shared(key, query), shared(value, query)
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.where(mask, 0.0, -math.inf)
        share = weights(masked_scores(query, key, is_causal, mask, scale), mask)
        return drop(share, rate, self.mask(share.shape, rate)) @ value


class SeededBernoulli(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """PyTorch's own dropouts with the masks that `SeededDropout` has for the same seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed, self.site = torch.tensor(seed), 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Fill what PyTorch fills with ones of probability 1 - rate; leave the rest."""
        if func is not aten.bernoulli_.float:
            return func(*args, **(kwargs or {}))
        noise: Tensor = args[0]
        share = args[1] if len(args) > 1 else 0.5  # the operator's default is left out
        self.site += 1
        return noise.copy_(keep(noise.shape, 1 - share, self.seed, self.site))
