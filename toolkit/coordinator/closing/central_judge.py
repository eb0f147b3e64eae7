"""The judge of new models: when it acts, and which devices it pauses.

`model_judge.py` finds the updates to leave out. `pause_rule.py` decides which devices are paused
because of such updates. The operator decides about a paused device. After `resume` the device takes
part again, and only its later updates count.
"""

from collections.abc import Mapping, Sequence

from device_agent.formats.protocol.fleet import RoundResult
from profiles.text_formatting import counted
from toolkit.aggregation.pause_rule import LAST, Harm, add_round
from toolkit.coordinator.closing.round_models import Samples
from toolkit.coordinator.coordinator import Coordinator
from toolkit.coordinator.database.operator_log import BY_JUDGE

JUDGE = "judge"
"""The name of the judge in the audit log."""


def judges(coordinator: Coordinator, held_out: Samples | None) -> bool:
    """Whether new models are judged. A site does not judge its models, because it receives them."""
    config = coordinator.config
    return held_out is not None and config.aggregation.judge and not config.site


def harm_of_devices(history: Sequence[RoundResult]) -> dict[str, Harm]:
    """The rounds in which the updates of each device did harm."""
    harm: dict[str, Harm] = {}
    for result in history:
        add_round(harm, result.round, result.left_out, result.limited)
    return harm


def pause_judged(coordinator: Coordinator) -> None:
    """Pause the devices whose updates have done too much harm since their last pause.

    If the coordinator is killed before the pause, it pauses the devices at its next start.
    """
    with coordinator.lock:  # a device may leave, or an operator may pause it, at any time
        for device, reason in _due(coordinator).items():
            coordinator.act("pause", device, reason, JUDGE)
            coordinator.notify("device-left-out", f"{device} is paused {reason}.", device=device)


def _due(coordinator: Coordinator) -> Mapping[str, str]:
    """The devices to pause, with the reasons. Each reason ends with the last round of harm."""
    store = coordinator.store
    due = {}
    for device, harm in harm_of_devices(store.history.results()).items():
        entries = store.operator_log.entries(0, 2**31, device)
        pauses = [entry for entry in entries if entry.who == JUDGE and entry.action == "pause"]
        told = max((_last_round(entry.reason) for entry in pauses), default=-1)
        sent = [round_ for round_, *_ in store.records.updates_of(device, LAST) if round_ > told]
        rounds = harm.to_pause_for(sent)
        paused = device in store.operator_log.decisions
        if rounds and not paused and not store.registry.device(device).has_left:
            due[device] = (
                f"{BY_JUDGE}: of its last {counted(len(sent), 'update')}, it {harm.text(rounds)}, "
                f"in the rounds {', '.join(map(str, rounds))}"
            )
    return due


def _last_round(reason: str) -> int:
    """The last round of harm, which is at the end of the reason of a pause."""
    return int(reason.rpartition(" ")[2])
