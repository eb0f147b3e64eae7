"""Lists a part of the devices for the operator, and describes one device with its history."""

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence

from device_agent.formats.protocol.fleet import DeviceStatus
from toolkit.coordinator.database.device_registry import Device
from toolkit.coordinator.federation_state import FederationState
from toolkit.coordinator.operation.messages import (
    AuditPage,
    DeviceDetail,
    DevicePage,
    FleetDevice,
    Sort,
    TrainedRound,
)
from toolkit.coordinator.rounds.limited_devices import limited_note, times_limited

MOST_SHOWN = 20
"""How many of the newest updates and audit entries of a device are shown."""


class DeviceList(FederationState):
    """Describes the devices of the federation."""

    def device_statuses(self, devices: Sequence[Device]) -> list[DeviceStatus]:
        """The status of each of these devices."""
        trained, now = (
            self.store.records.rounds_trained([d.id for d in devices]),
            self.clock(),
        )
        history = self.store.history.results()
        last, times = history[-1:], times_limited(history)
        newest = self.released.newest
        offered = None if newest is None else newest.number
        with self.lock:
            return [
                self.activity[d.id].status(
                    d,
                    self.submodel(d),
                    trained.get(d.id, 0),
                    now,
                    last,
                    self.store.release_reports.of(d.id),
                    offered,
                    limited_note(d.id, history, times, trained.get(d.id, 0)),
                )
                for d in devices
            ]

    def device_page(
        self,
        start: int,
        most: int,
        kind: str | None = None,
        state: str | None = None,
        search: str | None = None,
        sort: Sort = "joined",
        descending: bool = False,
    ) -> DevicePage:
        """At most `most` of the matching devices, from position `start` on (counted from 0).

        Args:
            start: How many matching devices are skipped.
            most: How many are listed.
            kind: Only devices of this kind.
            state: Only devices in this state.
            search: Only devices whose id or name contains this text, in upper or lower case.
            sort: The sort key. By default, devices are in the order in which they joined.
            descending: Whether the order is reversed.
        """
        text, activity = (search or "").lower(), self.activity
        with self.lock:
            matching = [
                device
                for device in self.store.registry.devices()
                if kind in (None, device.kind)
                and (text in device.id.lower() or text in device.name.lower())
                and state in (None, activity[device.id].state)
            ]
            states = Counter(activity[device.id].state for device in matching)
            if sort != "joined":
                matching.sort(key=self._sort_key(sort))
            if descending:
                matching.reverse()
            return DevicePage(
                start=start,
                total=len(matching),
                states=dict(states.most_common()),
                devices=self.fleet_devices(matching[start : start + most]),
            )

    def device_detail(self, identifier: str) -> DeviceDetail:
        """The device with this id. Raises RefusalError (404) if there is none."""
        with self.lock:
            device = self.known_device(identifier)
            due = self.secrets_due.get(identifier)
            return DeviceDetail(
                device=self.fleet_devices([device])[0],
                machine=json.loads(device.machine),
                updates=[
                    TrainedRound(*row)
                    for row in self.store.records.updates_of(device.id, MOST_SHOWN)
                ],
                audit=self.store.operator_log.entries(0, MOST_SHOWN, device.id),
                secret_until=None if due is None else due.until,
            )

    def audit_page(self, after: int, most: int) -> AuditPage:
        """Up to `most` entries of the audit log after number `after`."""
        log = self.store.operator_log
        return AuditPage(entries=log.entries(after, most), last=log.last())

    def fleet_devices(self, devices: Sequence[Device]) -> list[FleetDevice]:
        """These devices as the operator sees them."""
        decisions, shown = self.store.operator_log.decisions, []
        for device, status in zip(devices, self.device_statuses(devices), strict=True):
            decision = decisions.get(device.id)
            shown.append(
                FleetDevice(
                    **vars(status),
                    kind=device.kind,
                    decision=None if decision is None else decision.outcome,
                    reason=None if decision is None else decision.reason,
                    follows_key=self.follows_key(device.id),
                )
            )
        return shown

    def _sort_key(self, sort: Sort) -> Callable[[Device], tuple[float, str]]:
        """The key that sorts devices: a number or a text."""
        trained = self.store.records.rounds_trained() if sort == "trained" else {}

        def key(device: Device) -> tuple[float, str]:
            activity = self.activity[device.id]
            loss = -math.inf if activity.loss is None else activity.loss
            traffic = device.bytes_down + device.bytes_up
            numbers = {"seen": activity.seen_at, "loss": loss, "traffic": traffic}
            texts = {"name": device.name.lower(), "kind": device.kind, "state": activity.state}
            number = trained.get(device.id, 0) if sort == "trained" else numbers.get(sort, 0)
            return number, texts.get(sort, device.id)

        return key
