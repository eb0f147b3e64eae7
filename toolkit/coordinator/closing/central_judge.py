"""The judge of new models: when it acts, and which devices it pauses.

`model_judge.py` finds the updates to leave out. A device whose updates were left out three times is
paused. An operator decides about it. After `resume` the device takes part again; it is paused again
after three more times.
"""

from collections.abc import Mapping, Sequence

from device_agent.formats.protocol.fleet import RoundResult
from toolkit.aggregation.model_judge import JUDGED, Bar, Quality
from toolkit.coordinator.closing.round_aggregation import Samples
from toolkit.coordinator.coordinator import Coordinator
from toolkit.coordinator.database.operator_log import BY_JUDGE
from toolkit.coordinator.rounds.compared_rounds import of_one_model

TIMES = 3
"""A device is paused after its updates were left out this many times."""
JUDGE = "judge"
"""Who pauses such a device, in the audit log."""


def bar_of(coordinator: Coordinator, held_out: Samples | None) -> Bar | None:
    """The bar for the next model; None if this model is not judged.

    A site is not judged, because it receives its models.
    """
    config, store = coordinator.config, coordinator.store
    if held_out is None or not config.aggregation.judge or config.site:
        return None
    current = store.history.current_round()
    if current is None or store.settings.model_changed_after(current):
        return None  # the next model is the first of a changed `model`
    results = of_one_model(store.history.results())
    known = {r.round: Quality(r.accuracy, r.loss) for r in results if r.loss is not None}
    line = reversed(store.history.line(current + 1))
    models = [known[round_] for round_ in line if round_ in known]
    if not models:
        return None
    return Bar.of(known[min(known)], models, len(held_out[1]))


def rounds_judged(history: Sequence[RoundResult]) -> dict[str, list[int]]:
    """The rounds in which the judge left out the update of a device, by device."""
    rounds: dict[str, list[int]] = {}
    for result in history:
        for device, reason in result.left_out.items():
            if reason.startswith(JUDGED):
                rounds.setdefault(device, []).append(result.round)
    return rounds


def pause_judged(coordinator: Coordinator) -> None:
    """Pause the devices whose updates were left out TIMES times since the judge last paused them.

    If the coordinator is killed before, it pauses them at its next start.
    """
    with coordinator.lock:  # a device may leave, or an operator may pause it, at any time
        for device, reason in _due(coordinator).items():
            coordinator.act("pause", device, reason, JUDGE)
            coordinator.notify("device-left-out", f"{device} is paused {reason}.", device=device)


def _due(coordinator: Coordinator) -> Mapping[str, str]:
    """The devices to pause, with the reasons."""
    store = coordinator.store
    due = {}
    for device, rounds in rounds_judged(store.history.results()).items():
        entries = store.operator_log.entries(0, 2**31, device)
        pauses = sum(entry.who == JUDGE and entry.action == "pause" for entry in entries)
        fresh = rounds[pauses * TIMES :]
        paused = device in store.operator_log.decisions
        if len(fresh) >= TIMES and not paused and not store.registry.device(device).has_left:
            named = ", ".join(map(str, fresh[:TIMES]))
            due[device] = f"{BY_JUDGE}, which left out its updates of the rounds {named}"
    return due
