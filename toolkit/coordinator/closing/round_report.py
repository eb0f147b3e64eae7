"""Reports the result of a round to the operator, in the log and by notifications."""

import logging
from collections.abc import Sequence

from device_agent.formats.protocol.fleet import FederatedEvaluation, RoundResult, further_text
from profiles.text_formatting import counted, round_of
from toolkit.coordinator.coordinator import Coordinator
from toolkit.coordinator.rounds.falling_quality import falling
from toolkit.coordinator.rounds.limited_devices import limits_text

logger = logging.getLogger(__name__)


def tell_round(
    coordinator: Coordinator,
    result: RoundResult,
    received: FederatedEvaluation | None,
    about: str,
) -> None:
    """Log `result` with the text `about` its updates, and send the notifications about `result`.

    `received` is the devices' judgement of the model that they received in this round.
    """
    which = round_of(result.round, coordinator.rounds.total).capitalize()
    source = counted(result.updates, "update")
    quality = f"{result.quality()}{further_text(result.held_out)}"
    spent = "" if result.privacy is None else f"; {result.privacy.text()}"
    text = f"{which}: {quality}, from {source}{about}{spent}"
    logger.info(text)
    if (limits := limits_text(result)) is not None:
        far = any(own.is_far for own in result.limited.values())
        logger.log(logging.WARNING if far else logging.INFO, "%s: %s.", which, limits)
    if received is not None:
        logger.info("%s: received model: %s", which, received.text())
    if result.round:
        coordinator.notify(
            "round-closed",
            text,
            accuracy=result.accuracy,
            loss=result.loss,
            updates=result.updates,
            left_out=result.left_out,
            limited={device: own.text() for device, own in result.limited.items()},
        )
    history = coordinator.store.history.results()
    if (warning := falling(history)) is not None:
        logger.warning(warning)
        if falling(history[:-1]) is None:
            coordinator.notify("quality-falling", warning)


def staleness_text(counts: Sequence[int]) -> str:
    """The staleness of the updates for the log; empty without `counts`."""
    if not counts:
        return ""
    mean = sum(tau * count for tau, count in enumerate(counts)) / sum(counts)
    return f" of staleness {mean:.1f} (at most {len(counts) - 1})"
