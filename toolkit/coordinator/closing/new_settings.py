"""New settings of the operator take effect between two rounds."""

import logging

from toolkit.coordinator.closing.round_models import CarryingModel, Model
from toolkit.coordinator.coordinator import Coordinator
from toolkit.coordinator.federation_secrets import keep_secrets, read_secrets
from toolkit.coordinator.settings_check import checked_settings

logger = logging.getLogger(__name__)


def model_for_new_settings(coordinator: Coordinator) -> Model | None:
    """Let new settings take effect if their round is the next round, and return their model.

    Returns None if there are no new settings, or if an earlier round is open.
    """
    new, rounds, store = coordinator.new_settings, coordinator.rounds, coordinator.store
    between = rounds.phase in ("enrolling", "aggregating") and rounds.round == rounds.done
    if new is None or not between or rounds.done + 1 < new.round:
        return None
    model: Model = new.model
    loss = model.loss_code() if isinstance(model, CarryingModel) else None
    store.change_settings(
        rounds.done + 1, new.changes, checked_settings(new.config), log=(), loss=loss
    )
    if rounds.max_staleness is not None:
        store.keep_flights({})  # devices may get other submodels, so all devices begin again
    with coordinator.lock:
        config = coordinator.config = new.config
        coordinator.new_settings = None
        coordinator.begin_anew()
        coordinator.released.evaluation = config.evaluation.request
        rounds.total, rounds.deadline_s = config.last_round, config.deadline_s
        rounds.expected, rounds.quorum = config.expected_devices, config.closing_updates
        rounds.min_updates = config.min_updates
        if rounds.phase == "enrolling" and len(rounds.devices) >= rounds.expected:
            rounds.begin()
    keep_secrets(config, store, read_secrets(config, store, new_key=False))
    logger.info("Round %d begins with new settings.", rounds.done + 1)
    return model
