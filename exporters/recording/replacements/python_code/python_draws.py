"""Single numbers that a model draws by Python's `random` or by NumPy, drawn by torch instead.

So `if random.random() < 0.5:` asks for a traced number, and each training step draws its own.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from itertools import accumulate
from threading import get_ident
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from exporters.recording.choices.decisions import RANGE
from exporters.recording.replacements.gamma_draws import beta as beta_draw
from exporters.recording.replacements.gamma_draws import gamma as gamma_draw
from exporters.recording.replacements.python_code.python_functions import modules_of
from exporters.recurrence.replacements import LOCK


def number() -> Tensor:
    """`random.random()`: a number from 0 to 1."""
    return torch.rand(())


def uniform(low: Any = 0.0, high: Any = 1.0) -> Tensor:
    """`np.random.uniform(low, high)`."""
    drawn: Tensor = low + (high - low) * torch.rand(())
    return drawn


def between(a: Any, b: Any) -> Tensor:
    """`random.uniform(a, b)`."""
    return uniform(a, b)


def normal(loc: Any = 0.0, scale: Any = 1.0) -> Tensor:
    """`np.random.normal(loc, scale)`."""
    drawn: Tensor = loc + scale * torch.randn(())
    return drawn


def gauss(mu: Any = 0.0, sigma: Any = 1.0) -> Tensor:
    """`random.gauss(mu, sigma)`."""
    return normal(mu, sigma)


def standard_normal() -> Tensor:
    """`np.random.randn()`."""
    return torch.randn(())


def randint(low: Any, high: Any = None) -> Tensor:
    """`np.random.randint(low, high)`: a whole number from `low` to `high` - 1."""
    low, high = (0, low) if high is None else (low, high)
    drawn: Tensor = low + (torch.rand(()) * (high - low)).floor().to(torch.int64)
    if type(low) is int and type(high) is int:
        setattr(drawn, RANGE, range(low, high))
    return drawn


def randrange(start: Any, stop: Any = None) -> Tensor:
    """`random.randrange(start, stop)`."""
    return randint(start, stop)


def inclusive(a: Any, b: Any) -> Tensor:
    """`random.randint(a, b)`: a whole number from `a` to `b`."""
    return randint(a, b + 1)


def binomial(n: Any, p: Any) -> Tensor:
    """`np.random.binomial(1, p)`: 1 with the probability `p`, else 0."""
    hit: Tensor = torch.rand(()) < p
    return hit.to(torch.int64)


def exponential(scale: Any = 1.0) -> Tensor:
    """`np.random.exponential(scale)`."""
    drawn: Tensor = -scale * (1 - torch.rand(())).log()
    return drawn


def expovariate(lambd: Any = 1.0) -> Tensor:
    """`random.expovariate(lambd)`."""
    return exponential(1 / lambd)


def choice(seq: Sequence[Any]) -> Any:
    """`random.choice(seq)`: the number decides."""
    return seq[randint(len(seq))]  # type: ignore[call-overload]


def weighted_choice(a: Any, *, p: Any = None) -> Any:
    """`np.random.choice(a, p=p)`."""
    values = range(a) if isinstance(a, int) else a
    if p is None:
        return choice(values)
    drawn = torch.rand(())
    ends = zip(values, accumulate(p), strict=True)
    return next((value for value, end in ends if drawn < float(end)), values[-1])


def betavariate(alpha: Any, beta: Any) -> Tensor:
    """`random.betavariate(alpha, beta)`."""
    return beta_draw(alpha, beta)


def gammavariate(alpha: Any, beta: Any) -> Tensor:
    """`random.gammavariate(alpha, beta)`, whose second parameter is the scale."""
    return gamma_draw(alpha, beta)


PYTHONS: dict[str, Callable[..., Any]] = {
    "random": number,
    "uniform": between,
    "gauss": gauss,
    "normalvariate": gauss,
    "expovariate": expovariate,
    "betavariate": betavariate,
    "gammavariate": gammavariate,
    "randint": inclusive,
    "randrange": randrange,
    "choice": choice,
}
"""Functions of Python's `random`, as draws by torch."""
NUMPYS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("rand", "random", "random_sample", "ranf", "sample"), number),
    "uniform": uniform,
    "normal": normal,
    "randn": standard_normal,
    "standard_normal": standard_normal,
    "exponential": exponential,
    "beta": beta_draw,
    "gamma": gamma_draw,
    "standard_gamma": gamma_draw,
    "randint": randint,
    "binomial": binomial,
    "choice": weighted_choice,
}
"""Functions of `numpy.random`, as draws by torch."""


def drawn(own: Callable[..., Any], form: Callable[..., Any]) -> Callable[..., Any]:
    """`form` for calls that draw a single number, and the function `own` itself for others."""
    parameters, thread = signature(form), get_ident()

    def draw(*given: Any, **named: Any) -> Any:
        if get_ident() != thread:  # other code that happens to draw meanwhile
            return own(*given, **named)
        try:
            bound = parameters.bind(*given, **named).arguments
        except TypeError:  # for example, an array of a `size`
            return own(*given, **named)
        whole = {"a", "seq", "p"} if form in (choice, weighted_choice) else set()
        several = any(
            isinstance(value, list | tuple | np.ndarray)
            for name, value in bound.items()
            if name not in whole
        )
        if several or bound.get("n", 1) != 1:
            return own(*given, **named)
        return form(*given, **named)

    return draw


@contextmanager
def python_draws(model: nn.Module) -> Iterator[None]:
    """Context in which torch draws the numbers that the code of `model` draws by Python or NumPy.

    Draws of several numbers at once are not changed.
    """
    with LOCK:
        forms = {
            id(own): drawn(own, form)
            for space, table in ((vars(random), PYTHONS), (vars(np.random), NUMPYS))
            for name, form in table.items()
            if (own := space.get(name)) is not None
        }
        spaces = [vars(random), vars(np.random), *map(vars, modules_of(model))]
        changed = [
            (space, name, value)
            for space in spaces
            for name, value in space.items()
            if id(value) in forms
        ]
        for space, name, value in changed:
            space[name] = forms[id(value)]
        try:
            yield
        finally:
            for space, name, value in changed:
                space[name] = value
