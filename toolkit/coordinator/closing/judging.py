"""How devices judge the models: counts that come with updates, and answers about the last model."""

from msgspec import UnsetType

from device_agent.formats.protocol.fleet import FederatedEvaluation
from device_agent.formats.update import UpdateRecord
from profiles.json_decoding import decode_json
from toolkit.coordinator.coordinator import Coordinator
from toolkit.coordinator.rounds.device_evaluation import DeviceCounts, federated_evaluation


def counts_of_updates(coordinator: Coordinator, round_: int) -> dict[str, DeviceCounts]:
    """The counts that came with the updates of `round_`, by device."""
    store = coordinator.store
    received: dict[str, DeviceCounts] = {}
    if coordinator.config.evaluation.request is None:
        return received
    for device, _, body in store.updates(round_):
        evaluation = decode_json(body, UpdateRecord).evaluation
        if not isinstance(evaluation, UnsetType):
            kind = store.registry.device(device).kind
            received[device] = DeviceCounts(kind, evaluation.before, evaluation.after)
    return received


def judging_is_over(coordinator: Coordinator) -> bool:
    """Whether the judging of the last model has ended: all devices have answered, or time is over.

    The first call asks the devices. After the end, answers are refused.
    """
    rounds = coordinator.rounds
    with coordinator.lock:
        if rounds.judges and not rounds.is_judging:
            for name in sorted(rounds.judges):
                device = coordinator.store.registry.device(name)
                if not coordinator.bundles[coordinator.submodel(device)]:
                    rounds.judges.discard(name)
            rounds.open_judging(coordinator.clock())
        over = rounds.judging_is_over(coordinator.clock())
        if over:
            rounds.end_judging()
    return over


def last_figure(coordinator: Coordinator) -> FederatedEvaluation | None:
    """How the devices judge the model of the last round; None if no device has answered."""
    store = coordinator.store
    return federated_evaluation(
        coordinator.rounds.done,
        [
            DeviceCounts(store.registry.device(name).kind, counts)
            for name, counts in store.final_evaluation.answers().items()
            if counts is not None
        ],
    )
