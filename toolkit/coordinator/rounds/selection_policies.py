"""The policies that select the devices of a round. A policy is a pure function.

`serve` and `simulate` use the same policies, so a policy can be tried in a simulation first.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from device_agent.data.data_functions import load_function
from profiles.errors import InputError
from profiles.text_formatting import said_by
from toolkit.coordinator.federation_file.value_types import SELECTIONS


class Candidate(NamedTuple):
    """A device that a round may ask.

    Attributes:
        device: The id of the device, such as `phone-7`; in a simulation `client-7`.
        kind: The name of its kind.
        samples: The number of samples in its last update; None before its first. In a simulation
            it is always known.
        last_round: The last round that asked this device; 0 if none has.
    """

    device: str
    kind: str
    samples: int | None
    last_round: int


Policy = Callable[[np.random.Generator, Sequence[Candidate], int], Sequence[int] | np.ndarray]
"""Selects up to `count` candidates: `policy(draw, candidates, count)` returns their positions.

All randomness must come from `draw`. Then a repeated selection for the same round gives the same
devices.
"""


def uniform(draw: np.random.Generator, candidates: Sequence[Candidate], count: int) -> np.ndarray:
    """Select each candidate with the same probability, as in FedAvg."""
    return draw.choice(len(candidates), count, replace=False)


def by_data_size(
    draw: np.random.Generator, candidates: Sequence[Candidate], count: int
) -> np.ndarray:
    """Select one candidate after another, each with a probability proportional to its samples.

    If a candidate's number of samples is unknown, the mean of the known numbers replaces it. The
    sort keys are the logarithms of the keys in Efraimidis and Spirakis, "Weighted random sampling
    with a reservoir" (2006).
    """
    known = [candidate.samples for candidate in candidates if candidate.samples is not None]
    mean = float(np.mean(known)) if known else 1.0
    weights = [mean if c.samples is None else c.samples for c in candidates]
    keys = draw.exponential(size=len(candidates)) / np.maximum(weights, 1e-9)
    return np.argsort(keys, kind="stable")[:count]


def by_oldest_round(
    draw: np.random.Generator, candidates: Sequence[Candidate], count: int
) -> np.ndarray:
    """Select the candidates that were asked longest ago; equal candidates in random order."""
    rounds = np.array([candidate.last_round for candidate in candidates])
    return np.lexsort((draw.random(len(candidates)), rounds))[:count]


POLICIES: dict[str, Policy] = dict(
    zip(SELECTIONS, (uniform, by_data_size, by_oldest_round), strict=True)
)
"""The policies by the value of `selection` in the federation's file."""


def policy_called(selection: str) -> Policy:
    """The policy with this name, or the user's function `module:callable`.

    Raises DataError if the function cannot be loaded.
    """
    known = POLICIES.get(selection)
    return cast(Policy, load_function(selection)) if known is None else known


def selected(
    selection: str, draw: np.random.Generator, candidates: Sequence[Candidate], count: int
) -> list[int]:
    """The positions of the selected candidates, ascending.

    Args:
        selection: The policy's name, or a function `module:callable`.
        draw: The source of all randomness.
        candidates: At least one candidate.
        count: The most devices to select. If there are fewer candidates, all are selected.

    Raises:
        DataError: The user's function cannot be loaded.
        InputError: The user's function fails, or returns something else than positions.

    Examples:
        >>> known = [Candidate(f"phone-{n}", "phone", None, n) for n in (3, 1, 2)]
        >>> selected("oldest", np.random.default_rng(0), known, 2)
        [1, 2]
    """
    policy, count = policy_called(selection), min(count, len(candidates))
    try:
        returned: Any = policy(draw, candidates, count)
        positions = sorted(int(position) for position in returned)
    except Exception as error:
        if selection in POLICIES:
            raise
        raise InputError(
            "The selection {selection} failed: {error}: {reason}. It gets a random generator, the "
            "candidates and how many to select, and must return positions of candidates.",
            code="selection.failed",
            selection=selection,
            error=type(error).__name__,
            reason=said_by(error),
        ) from None
    distinct = set(positions)
    fits = distinct <= set(range(len(candidates))) and len(distinct) == len(positions)
    if not fits or not 1 <= len(positions) <= count:
        raise InputError(
            "The selection {selection} must return at least one and at most {count} positions of "
            "candidates. They must be different, and below {candidates}. It returned {returned}.",
            code="selection.bad-result",
            selection=selection,
            count=count,
            candidates=len(candidates),
            returned=f"{str(positions)[:80]} ({len(positions)})",
        )
    return positions
