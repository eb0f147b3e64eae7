"""The figure by which rounds are compared: for the best round, warnings and early stopping."""

import math
from collections.abc import Sequence

from device_agent.formats.protocol.fleet import RoundResult
from toolkit.coordinator.database.settings_log import MODEL

Figure = tuple[float | None, float]
"""Accuracy (None for a regression) and loss."""


def of_one_model(results: Sequence[RoundResult]) -> Sequence[RoundResult]:
    """The rounds since `model` last changed; all rounds if it never changed."""
    begins = f"{MODEL}: "
    changed = [
        number
        for number, result in enumerate(results)
        if any(change.startswith(begins) for change in result.changes)
    ]
    return results[changed[-1] :] if changed else results


def compared(results: Sequence[RoundResult]) -> list[tuple[RoundResult, Figure]]:
    """The rounds of the present model that can be compared, with their figures.

    If the newest judged round has figures on held-out samples, all figures are on these samples.
    Otherwise all figures are on the devices. `retention.BEST` says the same in SQL.
    """
    judged = [result for result in of_one_model(results) if result.judgement() is not None]
    if judged and judged[-1].loss is not None:
        return [(r, (r.accuracy, r.loss)) for r in judged if r.loss is not None]
    return [(r, (r.devices.accuracy, r.devices.loss)) for r in judged if r.devices is not None]


def is_better(figure: Figure, than: Figure) -> bool:
    """Whether the accuracy is higher, or equal with a lower loss.

    If there are no accuracies, whether the loss is lower.
    """
    return _key(figure) > _key(than)


def best_of(figures: Sequence[tuple[int, Figure]]) -> int:
    """The best round; if several are equal, the last of them. `figures` has at least one round."""
    best, figure = figures[0]
    for round_, later in figures:
        if not is_better(figure, later):
            best, figure = round_, later
    return best


def last_improvement(figures: Sequence[tuple[int, Figure]]) -> int:
    """The first round that no later round improves on. `figures` has at least one round."""
    best, figure = figures[0]
    for round_, later in figures:
        if is_better(later, figure):
            best, figure = round_, later
    return best


def stops_early(figures: Sequence[tuple[int, Figure]], patience: int | None) -> bool:
    """Whether the newest of `figures` is `patience` rounds or more after the last improvement."""
    if patience is None or not figures:
        return False
    return figures[-1][0] - last_improvement(figures) >= patience


def _key(figure: Figure) -> tuple[float, float]:
    accuracy, loss = figure
    if not math.isfinite(loss):  # a diverged model is right only by chance
        return -math.inf, -math.inf
    return (-1.0 if accuracy is None else accuracy), -loss
