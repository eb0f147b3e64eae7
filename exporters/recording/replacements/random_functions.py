"""Computes all random numbers of a model from uniform numbers, which a training step can draw.

`aten.rand` is seeded in a training step like a dropout. All other random numbers, such as normal
ones and integers, are computed from `aten.rand`. This is done both when the model is recorded and
when the recording is compared with the model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.nn import functional

from exporters.recording.replacements.gamma_draws import GAMMA_DRAWS
from exporters.recording.replacements.uniform_numbers import Sizes, standard_normal, uniform
from exporters.recurrence.replacements import LOCK, Replacement, Replacements

SELU_LIMIT = 1.7580993408473766
"""Dropped activations become the negative of this number, which is the limit of SELU at minus
infinity."""
Computes = Callable[..., Tensor]


def sizes(given: tuple[Any, ...], size: Any = None) -> Sizes:
    """The sizes in the arguments of `torch.rand`: one by one or as one sequence."""
    if size is not None:
        return list(size)
    first = given[0] if given else ()
    return list(first) if isinstance(first, tuple | list | torch.Size) else list(given)


def rand(_: Any, *given: Any, size: Any = None, dtype: Any = None, **__: Any) -> Tensor:
    """`torch.rand`."""
    return uniform(sizes(given, size)).to(dtype or torch.get_default_dtype())


def randn(_: Any, *given: Any, size: Any = None, dtype: Any = None, **__: Any) -> Tensor:
    """`torch.randn`."""
    return standard_normal(sizes(given, size)).to(dtype or torch.get_default_dtype())


def rand_like(_: Any, input: Tensor, dtype: Any = None, **__: Any) -> Tensor:
    """`torch.rand_like`."""
    return uniform(input.shape).to(dtype or input.dtype)


def randn_like(_: Any, input: Tensor, dtype: Any = None, **__: Any) -> Tensor:
    """`torch.randn_like`."""
    return standard_normal(input.shape).to(dtype or input.dtype)


def normal(_: Any, mean: Any, std: Any = 1.0, size: Any = None, **__: Any) -> Any:
    """`torch.normal`, whose mean and standard deviation are tensors or numbers."""
    if size is not None:
        return mean + std * standard_normal(size)
    both: Tensor = mean + std
    return mean + std * standard_normal(both.shape).to(both.dtype)


def normal_(_: Any, x: Tensor, mean: float = 0, std: float = 1, **__: Any) -> Tensor:
    """`Tensor.normal_`."""
    return x.copy_(mean + std * standard_normal(x.shape))


def uniform_(_: Any, x: Tensor, low: float = 0, high: float = 1, **more: Any) -> Tensor:
    """`Tensor.uniform_`; its bounds are called `from` and `to`."""
    low, high = more.get("from", low), more.get("to", high)
    return x.copy_(low + (high - low) * uniform(x.shape))


def exponential_(_: Any, x: Tensor, lambd: float = 1, **__: Any) -> Tensor:
    """`Tensor.exponential_`, which Gumbel softmax uses."""
    return x.copy_(uniform(x.shape).log() / -lambd)


def bernoulli(func: Computes, input: Tensor, *given: Any, **more: Any) -> Tensor:
    """`torch.bernoulli` of a tensor of probabilities."""
    if given or more.get("p") is not None:
        return func(input, *given, **more)
    return (uniform(input.shape).to(input.dtype) < input).to(input.dtype)


def bernoulli_(func: Computes, x: Tensor, p: Any = 0.5, **more: Any) -> Tensor:
    """`Tensor.bernoulli_`. If the probability is a number, the operator itself can be seeded."""
    if not isinstance(p, Tensor):
        return func(x, p, **more)
    return x.copy_(uniform(x.shape).to(p.dtype) < p)


def bounds(given: Sequence[int], low: int | None = None, high: int | None = None) -> list[int]:
    """The two bounds of `torch.randint`. If a single bound is given, the first bound is 0."""
    both = [bound for bound in (low, *given, high) if bound is not None]
    return both if len(both) == 2 else [0, *both]


def randint(_: Any, *given: Any, size: Any = None, dtype: Any = None, **more: Any) -> Tensor:
    """`torch.randint`."""
    *first, size = given if size is None else (*given, size)
    low, high = bounds(first, more.get("low"), more.get("high"))
    return (low + (uniform(size) * (high - low)).floor()).to(dtype or torch.int64)


def randint_like(_: Any, input: Tensor, *given: int, dtype: Any = None, **more: Any) -> Tensor:
    """`torch.randint_like`."""
    low, high = bounds(given, more.get("low"), more.get("high"))
    return (low + (uniform(input.shape) * (high - low)).floor()).to(dtype or input.dtype)


def randperm(_: Any, n: int, **__: Any) -> Tensor:
    """`torch.randperm`: the order of `n` random numbers."""
    return uniform([n]).argsort()


def gumbel_softmax(
    _: Any, logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Tensor:
    """`torch.nn.functional.gumbel_softmax`, which torch computes from exponential numbers."""
    noise = -(-uniform(logits.shape).log()).log()
    soft = ((logits + noise.to(logits.dtype)) / tau).softmax(dim)
    if not hard:
        return soft
    chosen = torch.zeros_like(logits).scatter(dim, soft.argmax(dim, keepdim=True), 1.0)
    return chosen - soft.detach() + soft


def alpha_dropout(
    whole_channels: bool,
) -> Replacement:
    """`alpha_dropout`, which keeps the mean and variance of activations of SELU.

    With `whole_channels` it is `feature_alpha_dropout`.
    """

    def drop(
        _: Any, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0:
            return input
        if p == 1:
            return input * 0
        shape = input.shape
        drawn = uniform([*shape[:2], *(1 for _ in shape[2:])] if whole_channels else shape)
        kept = (drawn.to(input.dtype) >= p).to(input.dtype)
        scale = ((SELU_LIMIT**2 * p + 1) * (1 - p)) ** -0.5
        dropped: Tensor = scale * (input * kept - SELU_LIMIT * (1 - p - kept))
        return input.copy_(dropped) if inplace else dropped

    return drop


def rrelu(
    _: Any,
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Tensor:
    """`torch.nn.functional.rrelu`: negative numbers are multiplied by random slopes."""
    share = uniform(input.shape).to(input.dtype) if training else 0.5
    result = torch.where(input > 0, input, input * (lower + (upper - lower) * share))
    return input.copy_(result) if inplace else result


DRAWS: dict[Any, Replacement] = {
    torch.rand: rand,
    torch.randn: randn,
    torch.rand_like: rand_like,
    torch.randn_like: randn_like,
    torch.normal: normal,
    Tensor.normal_: normal_,
    Tensor.uniform_: uniform_,
    Tensor.exponential_: exponential_,
    torch.bernoulli: bernoulli,
    Tensor.bernoulli: bernoulli,
    Tensor.bernoulli_: bernoulli_,
    torch.randint: randint,
    torch.randint_like: randint_like,
    torch.randperm: randperm,
    **GAMMA_DRAWS,
    functional.gumbel_softmax: gumbel_softmax,
    functional.rrelu: rrelu,
    torch.rrelu: rrelu,
    functional.alpha_dropout: alpha_dropout(whole_channels=False),
    functional.feature_alpha_dropout: alpha_dropout(whole_channels=True),
}
"""How each function of torch that draws is computed from uniform numbers."""


@contextmanager
def uniform_draws(
    more: Mapping[Any, Replacement] | None = None, context: type[Replacements] = Replacements
) -> Iterator[None]:
    """Context in which models draw only uniform numbers; `more` has further replacements.

    The replacements are made by `context`.

    Distributions do not check the values of their parameters, because a recording has no values.
    """
    with (
        LOCK,
        patch.object(Distribution, "_validate_args", False),
        context(DRAWS | dict(more or {})),
    ):
        yield
