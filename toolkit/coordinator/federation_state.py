"""The state of one federation, which all requests of devices and the round worker share."""

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from device_agent.formats.protocol.fleet import Preparation, SelectedDevices
from device_agent.formats.protocol.key_changes import KeyChange
from device_agent.formats.protocol.rounds import InputSummary
from device_agent.formats.protocol.secure_sums import SecureTerms
from profiles.text_formatting import did_you_mean
from toolkit.aggregation.privacy.budget import PrivacyPlan
from toolkit.coordinator.database import key_log, secret_log
from toolkit.coordinator.database.device_registry import Device, hashed
from toolkit.coordinator.database.operator_tokens import OPERATOR, Operator
from toolkit.coordinator.devices.coordinator_key import CoordinatorKey
from toolkit.coordinator.devices.device_activity import DeviceActivity
from toolkit.coordinator.devices.planned_submodel import SubmodelPlanner
from toolkit.coordinator.federation_file.federation_config import CoordinatorConfig
from toolkit.coordinator.minute_log import MinuteLog
from toolkit.coordinator.notifications import Event, EventName, Notifier
from toolkit.coordinator.refusals import RefusalError
from toolkit.coordinator.releases.offered_releases import OfferedReleases
from toolkit.coordinator.rounds.candidate import Candidate
from toolkit.coordinator.rounds.round_state import Rounds
from toolkit.coordinator.rounds.round_sums import RoundSums
from toolkit.coordinator.rounds.upload_validation import CheckUpdate
from toolkit.coordinator.storage.coordinator_store import Bundle, Store
from toolkit.coordinator.storage.release_folder import ReleaseFolder

NOISE = "noise_of_sums"
"""The key in the store for the largest noise multiplier of secure sums."""


@dataclass
class FederationState:
    """One federation.

    Attributes:
        config: The federation's file.
        store: The state that survives a restart.
        rounds: The state of the rounds.
        clock: Seconds of a clock that never jumps.
        wall_clock: Seconds since 1970.
        planner: Assigns submodels to devices of `auto` kinds. None until it is ready.
        operator_token: The token in operator.token, which allows all actions.
        key: Signs the work of devices.
        key_changes: The changes of `key`, the oldest first. Each change makes a new list.
        bundles: The bundles of the next or open round, by submodel.
        bundles_made: Submodels of the next round whose bundle is ready. Used while other bundles
            are still being made.
        preparations: The present preparations, by task.
        earlier_bundles: The bundles of earlier asynchronous rounds that devices may still train, by
            round, then by submodel.
        activity: The last known activity of each device.
        lock: Protects `rounds`, `bundles`, `bundles_made`, `preparations` and `activity`.
        settings_lock: Lets one change of the settings be applied at a time.
        changed: Wakes the round worker, for example after an update.
        closed_connections: A function that returns how many connections were closed because too
            many were open.
        is_stopping: A function that returns whether the server ends.
        minute_log: Limits the log lines that devices and strangers can cause.
        inputs: A summary of the held-out samples; devices compare their inputs with it.
        check_update: Raises UpdateError unless an update fits the global model; the round worker
            sets it.
        not_needed: The last round that closed, and how many of its devices it did not need.
        released: The releases that devices are offered. The round worker refreshes them.
        missed_deadlines: How many deadlines of the open round have passed with too few updates.
        round_published: Called after the result of a round was written.
        notifier: Tells the operator's own programs what happens.
        make_model: Makes the global model for changed settings; None if they cannot change now.
        try_model: Raises EdgeTailorError unless a new model can be evaluated; the round worker sets
            it.
        secrets_due: The devices that were asked for a new secret. Each change makes a new mapping.
        new_settings: The `NewSettings` that take effect in a later round, or None.
        wanted_model: The `WantedModel` to which the rounds go back as soon as possible, or None.
        privacy_plan: Differential privacy for devices; None without it.
        secure_terms: The terms of secure sums; None without them.
        sums: The secure sums of the open round; None if devices send their updates.
        candidate: The new model of the closed round, if a committee judges it. It stays until the
            next bundles are made, so that a late answer is ignored and not treated as an error.
    """

    config: CoordinatorConfig
    store: Store
    rounds: Rounds
    clock: Callable[[], float] = time.monotonic
    planner: SubmodelPlanner | None = None
    operator_token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    key: CoordinatorKey = field(default_factory=CoordinatorKey, repr=False)
    bundles: dict[str, Bundle] = field(default_factory=dict)
    bundles_made: set[str] = field(default_factory=set)
    earlier_bundles: dict[int, dict[str, Bundle]] = field(default_factory=dict)
    preparations: dict[str, Preparation] = field(default_factory=dict)
    activity: dict[str, DeviceActivity] = field(default_factory=dict)
    wall_clock: Callable[[], float] = time.time
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)
    settings_lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    changed: threading.Event = field(default_factory=threading.Event, repr=False)
    closed_connections: Callable[[], int] = lambda: 0
    is_stopping: Callable[[], bool] = lambda: False
    minute_log: MinuteLog = field(default_factory=MinuteLog, repr=False)
    inputs: InputSummary | None = None
    check_update: CheckUpdate | None = None
    not_needed: tuple[int, int] = (0, 0)
    released: OfferedReleases = field(init=False, repr=False)
    key_changes: list[KeyChange] = field(init=False, repr=False)
    secrets_due: secret_log.Due = field(init=False, repr=False)
    missed_deadlines: int = 0
    round_published: Callable[[], None] = lambda: None
    notifier: Notifier = field(default_factory=Notifier, repr=False)
    make_model: Callable[[CoordinatorConfig], object] | None = None
    try_model: Callable[[Any], None] = lambda model: None
    new_settings: Any = None
    wanted_model: Any = None
    candidate: Candidate | None = field(default=None, repr=False)
    privacy_plan: PrivacyPlan | None = field(init=False, repr=False)
    secure_terms: SecureTerms | None = field(init=False, repr=False)
    sums: RoundSums | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        folder = ReleaseFolder(self.store.folder)
        self.released = OfferedReleases(folder, self.config.evaluation.request)
        self.privacy_plan = self._with_kept_noise(self.config.privacy_plan())
        self.secure_terms = self.config.secure_terms(self.privacy_plan)
        self.sums = None if self.secure_terms is None else RoundSums(self.secure_terms)
        self.secrets_due = secret_log.decoded(self.store.value(secret_log.DUE_SECRETS))
        self.key_changes = key_log.decoded(self.store.value(key_log.KEY_CHANGES))

    def _with_kept_noise(self, plan: PrivacyPlan | None) -> PrivacyPlan | None:
        """`plan` with at least the noise of earlier starts: devices refuse sums with less."""
        table = self.config.privacy
        if plan is None or table is None or not table.secure_aggregation:
            return plan
        noise = max(plan.noise_multiplier, float(self.store.value(NOISE) or 0))
        self.store.set_value(NOISE, str(noise))
        return replace(plan, noise_multiplier=noise)

    def follows_key(self, device: str) -> bool | None:
        """Whether `device` is known to trust the newest key; None if no key was ever replaced."""
        if not self.key_changes:
            return None
        return self.store.trusted_keys.by_device.get(device) == self.key.fingerprint

    def note_trusted_key(self, device: str, fingerprint: str) -> None:
        """Record which key `device` trusts, by its `fingerprint`, if keys were ever replaced."""
        if self.key_changes:
            self.store.trusted_keys.note(device, fingerprint)

    def notify(self, event: EventName, text: str, **values: object) -> None:
        """Tell the operator's own programs about `event`, without waiting for them."""
        title, round_ = self.config.title, self.rounds.round
        self.notifier.send(
            Event(
                event=event,
                text=text,
                federation=title,
                round=round_,
                time=self.wall_clock(),
                values=values,
            )
        )

    def offered_bundle(self, device: Device) -> Bundle:
        """The bundle that `device` trains now; empty if there is none. The caller holds the lock.

        In asynchronous rounds this may be the bundle of an earlier round. A member of the committee
        gets the bundle that it evaluates.
        """
        if self.candidate is not None and device.id in self.candidate.before:
            return dict(self.candidate.bundles.get(self.submodel(device), {}))
        flight = self.rounds.flights.get(device.id)
        bundles = self.bundles if flight is None else self.earlier_bundles.get(flight.round, {})
        return bundles.get(self.submodel(device), {})

    def submodel(self, device: Device) -> str:
        """The submodel of `device` in the round that is open or opens next."""
        return self._submodel_of(*device.group)

    def _submodel_of(self, kind_name: str, planned: str | None, fallback_from: int | None) -> str:
        """The submodel of the devices of one group."""
        kind = self.config.kind(kind_name)
        replaced = fallback_from is not None and self.rounds.done + 1 >= fallback_from
        if replaced and kind.fallback is not None:
            return kind.fallback
        return planned or kind.submodel

    def operator_with(self, token: str) -> Operator | None:
        """The operator with this token; None if no operator has it."""
        if secrets.compare_digest(hashed(token), hashed(self.operator_token)):
            return Operator(name=OPERATOR, role=OPERATOR, made=0.0)
        return self.store.operators.holder(token)

    def selected_devices(self) -> SelectedDevices | None:
        """How many devices the open round has selected; None if none is open, or if it asks all.

        The caller holds the lock.
        """
        rounds = self.rounds
        if rounds.goal is None or rounds.phase != "training":
            return None
        last, not_needed = self.not_needed
        return SelectedDevices(
            asked=rounds.asked,
            goal=rounds.goal.updates,
            came=len(rounds.updates),
            not_needed=not_needed,
            last_round=last,
        )

    def known_device(self, identifier: str) -> Device:
        """The device with this id. Raises RefusalError (404) if there is none."""
        devices = [device.id for device in self.store.registry.devices()]
        if identifier not in devices:
            raise RefusalError(
                "This federation has no device {device!r}{hint} `edgetailor devices` lists all.",
                status=404,
                code="operator.unknown-device",
                device=identifier[:64],
                hint=did_you_mean(identifier, devices),
            )
        return self.store.registry.device(identifier)

    def note_reopening(self) -> None:
        """Forget the open round's deadline if no device is left in it: the round opens again."""
        if self.rounds.phase == "aggregating" and not self.rounds.updates:
            self.store.open_round.end()
