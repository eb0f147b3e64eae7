"""Computes dropout masks from a seed, which the device passes to each step.

Runtimes draw random numbers in different ways, or cannot draw any. Here each element of a mask is a
hash of the seed, the dropout's number in the model and the element's position. The hash uses
integer arithmetic, so every runtime computes the same mask.
"""

import math
from typing import Any, Self

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from exporters.decompositions.attention import masked_scores, repeat_heads, weights

aten = torch.ops.aten
PRIME = 2**31 - 1
# u, v < 2^30: their sum is below 2^31, and its square fits into int64.
HALF = 2**30
STEP = 1_103_515_245
"""Multiplier of the linear congruential generator that ISO C gives as an example of rand()."""
SCALED_ATTENTION = aten.scaled_dot_product_attention.default
DRAW = aten.bernoulli.p
"""Draws ones with a given probability. Models that drop whole branches at random call it."""
SEEDED = {aten.dropout.default: 1, aten.feature_dropout.default: 1, SCALED_ATTENTION: 4, DRAW: 1}
"""Operators with seeded dropout, and the position of the probability in their arguments."""
UNIFORM = aten.rand.default
"""Draws numbers from 0 to 1; all other random numbers of models are computed from them."""


def hash_integers(values: Tensor, offset: Tensor | int) -> Tensor:
    """Hash integers to 0 .. PRIME - 1: two rounds of z -> z^2 + constant mod PRIME.

    The first z is STEP * `values` + `offset`. If 0 <= `values`, `offset` < 2^31, no intermediate
    number exceeds 2^63.
    """
    z = (values * STEP + offset) % PRIME
    z = (z * z + 12345) % PRIME
    return (z * z + 67890) % PRIME


def keep_mask(shape: Any, rate: float, seed: Tensor, site: int) -> Tensor:
    """Compute which elements a dropout keeps. Each is kept with probability 1 - `rate`.

    An element is kept if its random integer is at least `rate` * PRIME.

    Args:
        shape: Shape of the tensor that the dropout reads.
        rate: Probability that an element is dropped.
        seed: int64 scalar, 0 <= seed < PRIME.
        site: Number of the dropout in the model.

    Returns:
        Booleans of `shape`.
    """
    return random_integers(shape, seed, site) >= round(rate * PRIME)


def random_integers(shape: Any, seed: Tensor, site: int) -> Tensor:
    """Integers of `shape` from 0 to PRIME - 1, for dropout number `site` of the model.

    The result is computed as a matrix. Its rows are the first axis, and its columns are all other
    axes. Element (i, j) is (u_i + v_j)^2 mod PRIME, where u and v are hashes.
    """
    # One hash for each row and column, not for each element: the square mixes them, and a large
    # tensor costs one multiplication and one remainder for each element.
    rows, columns = (shape[0] if shape else 1), math.prod(shape[1:])
    start = hash_integers(seed, 2 * site + 1)
    u = hash_integers(torch.arange(rows), start) % HALF
    v = hash_integers(torch.arange(columns), hash_integers(start, 2 * site + 2)) % HALF
    z = u.unsqueeze(1) + v
    return ((z * z) % PRIME).reshape(shape)


def uniform_numbers(shape: Any, seed: Tensor, site: int) -> Tensor:
    """Numbers of `shape` between 0 and 1, for random draw number `site` of the model.

    The numbers have 24 bits, so that they are exact in float32.
    """
    z = random_integers(shape, seed, site)
    return (z - z % 256 + 128) / (PRIME + 1)


def drop(x: Tensor, rate: float, kept: Tensor) -> Tensor:
    """Return x / (1 - rate) where `kept` is true, else 0."""
    # A rate of 1 keeps nothing; its scale would be infinite.
    return torch.where(kept, x * (1 / (1 - rate) if rate < 1 else 0.0), 0.0)


def has_dropout(graph: GraphModule) -> bool:
    """Whether the recorded `graph` has a dropout or a draw that `SeededDropout` replaces."""
    return any(
        node.target is UNIFORM
        or (node.target in SEEDED and dropout_rate(node.target, node.args) > 0)
        for node in graph.graph.nodes
    )


def dropout_rate(operator: Any, args: tuple[Any, ...]) -> float:
    """The dropout probability in the arguments of `operator`; 0 in inference mode."""
    position = SEEDED[operator]
    rate = float(args[position]) if len(args) > position else 0.0
    if operator is DRAW:
        return 1 - rate
    # Argument 2 of both dropout operators says whether they train. Attention has no such argument.
    return rate if operator is SCALED_ATTENTION or args[2] else 0.0


class SeededDropout(TorchFunctionMode):
    """Context in which the dropouts of a recorded graph compute their masks from `seed`.

    The n-th dropout that runs has number n. Open a new context for each pass.
    """

    def __init__(self, seed: Tensor) -> None:
        super().__init__()
        self.seed, self.site = seed, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Replace dropouts and draws; run other functions unchanged."""
        if func is UNIFORM:
            self.site += 1
            return uniform_numbers(args[0], self.seed, self.site)
        rate = dropout_rate(func, args) if func in SEEDED else 0.0
        if rate == 0:
            return func(*args, **(kwargs or {}))
        if func is SCALED_ATTENTION:
            return self.attention(*args, **(kwargs or {}))
        x: Tensor = args[0]
        if func is DRAW:
            return self.mask(x.shape, rate).to(x.dtype)
        whole = func is aten.dropout.default
        # Dropout of channels drops whole channels: one decision for each sample and channel.
        shape = x.shape if whole else (*x.shape[:2], *[1] * (x.dim() - 2))
        return drop(x, rate, self.mask(shape, rate))

    def mask(self, shape: Any, rate: float) -> Tensor:
        """The mask of the next dropout."""
        self.site += 1
        return keep_mask(shape, rate, self.seed, self.site)

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
        """Attention with dropout: drop(P) V with P = softmax(s Q K^T + mask)."""
        if enable_gqa:
            key, value = repeat_heads(key, query), repeat_heads(value, query)
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.where(mask, 0.0, -math.inf)
        p = weights(masked_scores(query, key, is_causal, mask, scale), mask)
        return drop(p, rate, self.mask(p.shape, rate)) @ value


class SeededBernoulli(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context in which PyTorch's own dropouts use the masks of `SeededDropout` with `seed`.

    Args:
        seed: The seed.
        numbered: Whether the n-th draw has number n, as in `SeededDropout`. Otherwise all draws of
            one shape are equal, so that a model that skips some draws can be compared with its
            recording.
    """

    def __init__(self, seed: int, numbered: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed, self.site, self.step = torch.tensor(seed), 0, int(numbered)

    def again(self) -> Self:
        """This context, with the first number for its next draw."""
        self.site = 0
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Replace the random draw of a dropout; run other operators unchanged."""
        if func is UNIFORM:
            self.site += self.step
            return uniform_numbers(args[0], self.seed, self.site)
        if func not in (aten.bernoulli_.float, DRAW):
            return func(*args, **(kwargs or {}))
        noise: Tensor = args[0]
        share = args[1] if len(args) > 1 else 0.5  # torch leaves out default arguments
        self.site += self.step
        kept = keep_mask(noise.shape, 1 - share, self.seed, self.site)
        return kept.to(noise.dtype) if func is DRAW else noise.copy_(kept)
