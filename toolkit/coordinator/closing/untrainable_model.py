"""Goes back to an earlier global model if most devices cannot train the current one."""

import logging

from profiles.text_formatting import counted
from toolkit.coordinator.coordinator import Coordinator
from toolkit.coordinator.database.device_registry import label
from toolkit.coordinator.database.suspicions import Suspect
from toolkit.coordinator.operation.model_actions import WantedModel

logger = logging.getLogger(__name__)

STUCK = "Training diverged on most devices {more} times, and there is no model to go back to."


def is_spoilt(coordinator: Coordinator) -> bool:
    """Whether the model of the open round is the reason why trainings diverge.

    The caller holds the lock.
    """
    if not coordinator.rounds.diverged:
        return False
    suspect = _suspect(coordinator)
    return coordinator.rounds.model_is_at_fault(None if suspect is None else suspect.device)


def go_back(coordinator: Coordinator) -> bool:
    """Restart the open round from an earlier model, and log it.

    The device whose update may have spoilt the model is left out from now on. Nothing changes if
    there is no earlier model, or if the coordinator is a site, which receives its models.

    Returns:
        Whether the current model has changed.
    """
    store, rounds = coordinator.store, coordinator.rounds
    with coordinator.lock:
        suspect, target = _suspect(coordinator), store.earlier_model()
        diverged, round_ = sorted(rounds.diverged), rounds.done + 1
        # The report of a single device is not enough to leave another device out.
        suspect = suspect if len(diverged) >= 2 else None
        rounds.diverged.clear()
        text = (
            f"Round {round_}: training diverged on {counted(len(diverged), 'device')} "
            f"({', '.join(diverged)}), so the model that they received is at fault."
        )
        if coordinator.config.site or target is None:
            text += " There is no earlier model to go back to: lower learning_rate in [training]."
        else:
            rounds.reopen()
            coordinator.begin_anew()
            text += f" The round starts again from the model of round {target}."
            if suspect is not None:
                rounds.left_out.add(suspect.device)
                text += f" {_blame(coordinator, suspect)}"
    if coordinator.config.site or target is None:
        store.suspicions.note_spoilt(rounds.done, text)
        # The round opens again, and its devices may send the same report at any rate.
        if coordinator.minute_log.begins("", STUCK):
            logger.warning(text)
        return False
    store.rollback(target, suspect)
    store.suspicions.note_spoilt(rounds.done, text)
    logger.warning(text)
    coordinator.notify("model-taken-back", text, target=target)
    if suspect is not None:
        coordinator.notify("device-left-out", text, device=suspect.device)
    return True


def go_back_as_wanted(coordinator: Coordinator) -> bool:
    """Go back to the model that the operator wants, if any. Returns whether the model changed."""
    with coordinator.lock:
        wanted: WantedModel | None = coordinator.wanted_model
        coordinator.wanted_model = None
        if wanted is None:
            return False
        coordinator.rounds.reopen()
        coordinator.begin_anew()
    number = coordinator.store.rollback(wanted.target, action=wanted.action)
    text = f"Round {number} starts from the model of round {wanted.target}"
    logger.info("%s: %s", text, wanted.action.reason)
    coordinator.notify("model-taken-back", f"{text}.", target=wanted.target)
    wanted.done.set()
    return True


def _suspect(coordinator: Coordinator) -> Suspect | None:
    """The update that may have spoilt the model. None if no other device takes part in rounds."""
    store = coordinator.store
    suspect = store.suspicions.suspect(store.history.current_round())
    if suspect is None or not coordinator.rounds.present - {suspect.device}:
        return None
    return suspect


def _blame(coordinator: Coordinator, suspect: Suspect) -> str:
    device = coordinator.store.registry.device(suspect.device)
    return (
        f"The update of {label(device)} in round {suspect.round} is suspected: {suspect.reason}. "
        "This device is left out of the rounds until it leaves and joins again."
    )
