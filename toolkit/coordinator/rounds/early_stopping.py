"""Early stopping: the rounds end when the models do not improve any more."""

import logging
from dataclasses import replace

from device_agent.formats.protocol.fleet import FederatedEvaluation, RoundResult
from profiles.text_formatting import counted
from toolkit.coordinator.federation_file.federation_config import FederationConfig
from toolkit.coordinator.rounds.compared_rounds import compared, last_improvement, stops_early
from toolkit.coordinator.storage.coordinator_store import Store

logger = logging.getLogger(__name__)
EARLY_STOP = "early_stop"
"""The key in the store for the `early_stopping` that ended the rounds, and for the last round."""


def ends_early(
    store: Store,
    config: FederationConfig,
    result: RoundResult,
    received: FederatedEvaluation | None,
) -> bool:
    """Whether the rounds end early with `result`, which is not in `store` yet.

    If the rounds end, logs the reason.

    `received` is the devices' judgement of the model that the round started from.
    """
    if config.early_stopping is None:
        return False
    history = store.history.results()
    result = replace(result, changes=store.settings.by_round().get(result.round, []))
    if received is not None:
        start = store.history.current_round()
        history = [replace(r, devices=received) if r.round == start else r for r in history]
    judged = compared([*history, result])
    figures = [(earlier.round, figure) for earlier, figure in judged]
    if not stops_early(figures, config.early_stopping):
        return False
    best = last_improvement(figures)
    logger.info(
        "The rounds end after round %d: no model was better than that of round %d (%s) for %s.",
        result.round,
        best,
        next(earlier.quality() for earlier, _ in judged if earlier.round == best),
        counted(figures[-1][0] - best, "round"),
    )
    return True


def note_early_end(
    store: Store, config: FederationConfig, round_: int, for_good: bool = False
) -> None:
    """Store that the rounds end early after `round_`.

    A change of `early_stopping` lets the rounds go on, except if they end `for_good`.
    """
    store.set_value(EARLY_STOP, f"for good {round_}" if for_good else _end(config, round_))


def ended_early(store: Store, config: FederationConfig, done: int) -> bool:
    """Whether the rounds ended early after `done`.

    If `early_stopping` was changed, rounds go on, unless they ended for good.
    """
    return store.value(EARLY_STOP) in (_end(config, done), f"for good {done}")


def _end(config: FederationConfig, round_: int) -> str:
    return f"{config.early_stopping} {round_}"
