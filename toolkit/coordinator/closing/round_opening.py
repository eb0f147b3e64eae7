"""Prepares the bundles of a round, and opens it for its devices."""

import logging
from collections.abc import Callable, Collection, Iterator

from device_agent.formats.manifest import MANIFEST
from device_agent.formats.protocol.fleet import Preparation
from profiles.errors import EdgeTailorError
from toolkit.coordinator.closing.device_selection import DeviceSelection
from toolkit.coordinator.closing.round_models import Model
from toolkit.coordinator.closing.untrainable_model import is_spoilt
from toolkit.coordinator.coordinator import STARTED, Coordinator
from toolkit.coordinator.database.device_registry import hashed
from toolkit.coordinator.database.open_round import Selected
from toolkit.coordinator.rounds.round_state import Goal
from toolkit.coordinator.storage.coordinator_store import Bundle

logger = logging.getLogger(__name__)


class RoundOpening:
    """Prepares and opens the rounds of `coordinator`, for the worker thread.

    Args:
        coordinator: The coordinator.
        model: The global model.
        selection: Selects the devices of a round.
        when_room: Calls a function that writes, and repeats the call while the disk is full.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        model: Model,
        selection: DeviceSelection,
        when_room: Callable[[Callable[[], None]], None],
    ) -> None:
        self._coordinator, self._model = coordinator, model
        self._selection, self._when_room = selection, when_room
        self._unmade: dict[str, str] = {}
        self._exported: set[str] = set()

    def take_model(self, model: Model) -> None:
        """Make the bundles of later rounds from `model`, which has new settings."""
        self._model, self._exported = model, set()

    def is_prepared(self) -> bool:
        """Whether every bundle of the next round is made."""
        return self._coordinator.submodels() <= self._coordinator.bundles.keys()

    def prepare(self) -> None:
        """Make the bundles of the next round.

        Raises EdgeTailorError if no submodel is possible for the model.
        """
        self._when_room(self._prepare)

    def _prepare(self) -> None:
        coordinator = self._coordinator
        round_ = coordinator.rounds.done + 1
        most = coordinator.rounds.max_staleness
        oldest = None if most is None else round_ - most
        kept = coordinator.store.set_bundles(round_, self._bundles(round_), oldest)
        with coordinator.lock:
            coordinator.bundles, coordinator.bundles_made = kept, set()
            coordinator.candidate = None
            coordinator.note_preparation("bundles", None)

    def _bundles(self, round_: int) -> Iterator[tuple[str, dict[str, bytes]]]:
        """Yield each submodel of `round_` with the files of its bundle.

        A submodel that is not possible for the model has no files. Raises EdgeTailorError if no
        submodel is possible.
        """
        coordinator = self._coordinator
        needed = sorted(coordinator.submodels())
        self._unmade = {}
        for number, submodel in enumerate(needed, 1):
            if submodel not in self._exported:  # later rounds only cut new weights
                logger.info(
                    "Round %d: preparing %s (%d of %d).", round_, submodel, number, len(needed)
                )
            self._exported.add(submodel)
            coordinator.note_preparation(
                "bundles",
                Preparation(task="bundles", submodel=submodel, number=number, total=len(needed)),
            )
            try:
                files = self._model.bundle(submodel, round_)
            except EdgeTailorError as error:
                self._unmade[submodel] = str(error)
                if len(self._unmade) == len(needed):
                    raise
                files = {}
            yield submodel, files
            with coordinator.lock:
                coordinator.bundles_made.add(submodel)

    def open_if_ready(self) -> None:
        """Open the next round if enough devices are there."""
        coordinator = self._coordinator
        round_, store = coordinator.rounds.done + 1, coordinator.store
        if store.operator_log.pause_reason is not None and not store.open_round.is_open(round_):
            return
        if self._selection.is_ready(round_):
            self._when_room(self._open)
            coordinator.store.remove_unnamed()  # last, so that no device waits for it

    def _open(self) -> None:
        """Open the next round, or continue it with the updates that came before a restart."""
        coordinator, rounds = self._coordinator, self._coordinator.rounds
        store = coordinator.store
        round_ = rounds.done + 1
        for damaged in store.drop_damaged(round_):
            logger.warning("The update of %s is damaged: the device sends it again.", damaged)
        earlier = {name: hashed(body.decode()) for name, _, body in store.updates(round_)}
        store.set_once(STARTED, "yes")
        wall, limit = coordinator.wall_clock(), rounds.deadline_s
        asked = self._selection.asked(round_, earlier)
        remaining = store.open_round.begin(round_, wall + limit, asked) - wall
        failures = store.open_round.failures(round_)
        with coordinator.lock:
            # Meanwhile devices may have joined, left or reported a divergence.
            bundles = self._asked_bundles(asked, earlier) if self.is_prepared() else {}
            if rounds.present and bundles and not is_spoilt(coordinator):
                offers = {name: files[MANIFEST].sha256 for name, files in bundles.items() if files}
                # A wall clock that was set while no coordinator ran must not keep the round open.
                left = min(max(remaining, 0.0), max(limit, store.open_round.moved_by(round_)))
                everyone = dict.fromkeys(bundles, "") | offers
                goal = None if asked is None else Goal(asked.goal, asked.needed)
                coordinator.note_too_old()
                rounds.open(everyone, coordinator.clock(), left, goal)
                if coordinator.sums is not None:
                    coordinator.sums.clear()  # devices offer new keys, also if it opens again
                for name, update in earlier.items():
                    if name in offers:
                        rounds.take_again(name, update)
                    elif store.registry.device(name).has_left:
                        rounds.count_left(name, update)
                for name in failures:
                    rounds.excuse(name)
                for name in bundles.keys() - offers.keys():
                    device = store.registry.device(name)
                    reason = self._unmade.get(coordinator.submodel(device), "")
                    coordinator.excuse(device, f"it has no bundle in round {round_}: {reason}")
        if rounds.phase == "aggregating":  # no device is left in the round
            store.open_round.end()

    def _asked_bundles(self, asked: Selected | None, earlier: Collection[str]) -> dict[str, Bundle]:
        """The bundle of each device that a round is opened for, by device.

        These are the devices in `asked` (None means all), the devices in `earlier`, which have
        already sent an update, and devices with an empty bundle, which need not train.
        """
        coordinator = self._coordinator
        counted_on = coordinator.rounds.present | set(earlier)
        chosen = None if asked is None else {*asked.devices, *earlier}
        bundles = {
            device.id: coordinator.bundles[coordinator.submodel(device)]
            for device in coordinator.store.registry.members()
            if device.id in counted_on
        }
        return {
            name: files
            for name, files in bundles.items()
            if chosen is None or name in chosen or not files
        }
