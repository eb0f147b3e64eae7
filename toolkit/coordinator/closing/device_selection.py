"""Selects the devices of each round, if the federation's file has `clients_per_round`."""

from collections.abc import Collection

import numpy as np

from toolkit.coordinator.closing.private_rounds import PrivateRounds
from toolkit.coordinator.coordinator import Coordinator
from toolkit.coordinator.database.device_registry import Device
from toolkit.coordinator.database.open_round import Selected
from toolkit.coordinator.database.operator_log import PAUSED
from toolkit.coordinator.rounds.round_state import fewest_updates
from toolkit.coordinator.rounds.selection_policies import Candidate, selected

SEEN_WITHIN_S = 120.0
"""A device is eligible if it was seen within this time. Waiting devices ask every 10 s, and devices
that train every 60 s."""
ALL_HERE_S = 10.0
"""A round waits this long for the additional devices of `over_selection`. By then every device that
waits has asked once."""
FEW_HERE_S = 60.0
"""A round with fewer eligible devices than its goal opens after this time, if it can still get as
many updates as it needs."""


class DeviceSelection:
    """Decides when enough devices are there, and which of them a round asks.

    A device is eligible if it was seen lately, has a bundle, and is not paused by its owner's
    limits. A device that a round has asked must also have been seen since that round asked it. So
    rounds do not keep asking a device that is away. With `private`, a round asks each eligible
    device with the same probability. If too few updates have come at the deadline, the round opens
    again for other devices, or waits for them.
    """

    def __init__(self, coordinator: Coordinator, private: PrivateRounds | None = None) -> None:
        self._coordinator, self._private = coordinator, private
        self._waits_since: float | None = None

    def is_ready(self, round_: int) -> bool:
        """Whether `round_` can open now, or was open before a restart."""
        coordinator = self._coordinator
        config, store = coordinator.config, coordinator.store
        goal, fewest = self._limits(round_)
        if goal is None or store.open_round.is_open(round_):
            return True
        earlier = store.records.senders(round_)
        with coordinator.lock:
            free = len(self._free(earlier))
            present = len(coordinator.rounds.present - earlier)
        now, sent = coordinator.clock(), len(earlier)
        if self._waits_since is None:
            self._waits_since = now
        waited = now - self._waits_since
        if self._private is not None:
            return free >= max(present, 1) or (free > 0 and waited >= ALL_HERE_S)
        return (
            free >= min(config.devices_asked(goal) - sent, max(present, 1))
            or (sent + free >= goal and waited >= ALL_HERE_S)
            or (sent + free >= fewest and waited >= FEW_HERE_S)
        )

    def asked(self, round_: int, earlier: Collection[str]) -> Selected | None:
        """The devices that `round_` asks, and its limits; None if it asks all.

        If the round is open after a restart, these are the devices that it asked before. Otherwise
        the devices are drawn. Devices in `earlier` have already sent an update for this round. The
        limits are the limits of the round's first opening, even if the settings have changed later.
        """
        coordinator = self._coordinator
        store, config = coordinator.store, coordinator.config
        if store.open_round.is_open(round_):
            return store.open_round.selected(round_)
        goal, needed = self._limits(round_)
        if self._private is not None:
            return self._drawn(self._private, round_, earlier, goal is None)
        if goal is None:
            return None
        self._waits_since = None
        past = store.open_round.past_selections()
        with coordinator.lock:
            free = self._free(earlier)
        candidates = []
        for device in free:
            last_round, samples = past.get(device.id, (0, None))
            candidates.append(Candidate(device.id, device.kind, samples, last_round))
        count = config.devices_asked(goal) - len(earlier)
        chosen: list[str] = []
        if candidates and count > 0:
            draw = np.random.default_rng([config.seed, round_, store.open_round.draws(round_)])
            positions = selected(config.selection, draw, candidates, count)
            chosen = [candidates[position].device for position in positions]
        for name in chosen:
            coordinator.activity[name].has_come = False
        asked = [*chosen, *earlier]
        if store.open_round.limits(round_) is None:
            needed = fewest_updates(len(asked), len(asked), config.min_updates, goal)
        return Selected(asked, goal, needed)

    def _drawn(
        self, private: PrivateRounds, round_: int, earlier: Collection[str], all_: bool
    ) -> Selected | None:
        """Draw the devices of a round with differential privacy; None if it asks `all_`.

        Such a round waits for all devices that it asks. At its deadline it closes with any number
        of updates.
        """
        coordinator = self._coordinator
        self._waits_since = None
        with coordinator.lock:
            present = coordinator.rounds.present
            free = [d for d in coordinator.store.registry.members() if d.id in present]
            free = free if all_ else self._free(earlier)
        chosen = private.asked(round_, free)
        if all_:
            return None
        for name in chosen:
            coordinator.activity[name].has_come = False
        asked = [*chosen, *earlier]
        return Selected(asked, max(len(asked), 1), 1)

    def _limits(self, round_: int) -> tuple[int | None, int]:
        """The goal of `round_`, None if it asks all devices, and the fewest updates it needs.

        Before the round has opened for the first time, these are the goal and `min_updates` of the
        settings.
        """
        coordinator = self._coordinator
        config = coordinator.config
        with coordinator.lock:
            members = len(coordinator.rounds.devices)
        stored = coordinator.store.open_round.limits(round_)
        return stored or (config.updates_wanted(members), config.min_updates or 1)

    def _free(self, earlier: Collection[str]) -> list[Device]:
        """The devices that may be asked, without those in `earlier`. The caller holds the lock."""
        coordinator = self._coordinator
        oldest, present = coordinator.clock() - SEEN_WITHIN_S, coordinator.rounds.present
        return [
            device
            for device in coordinator.store.registry.members()
            if device.id in present
            and device.id not in earlier
            and coordinator.bundles.get(coordinator.submodel(device))
            and (activity := coordinator.activity[device.id]).has_come
            and activity.seen_at >= oldest
            and activity.state != PAUSED
        ]
