"""The counts that phones and agents send when they judge models."""

import json
from typing import Any

import msgspec
import pytest

from device_agent.formats.evaluation_counts import Judgement
from device_agent.formats.protocol.rounds import Receipt
from toolkit.coordinator.database.device_registry import Device
from toolkit.coordinator.server import Server


class Counts:
    """The counts that a coordinator gets, by the names of devices: of updates, and at the end."""

    def __init__(self, server: Server) -> None:
        self.updates: dict[str, list[dict[str, Any]]] = {}
        self.last: dict[str, dict[str, Any]] = {}
        coordinator = server.coordinator
        take_update, take_judgement = coordinator.take_update, coordinator.take_judgement

        def update(device: Device, round_: int, body: bytes) -> Receipt:
            record = json.loads(body)
            judged = record.get("evaluation", {}) | {"trained": record["samples"]}
            self.updates.setdefault(device.name, []).append(judged)
            return take_update(device, round_, body)

        def judge(device: Device, round_: int, judgement: Judgement) -> Receipt:
            self.last[device.name] = json.loads(msgspec.json.encode(judgement.counts))
            return take_judgement(device, round_, judgement)

        coordinator.take_update, coordinator.take_judgement = update, judge  # type: ignore[method-assign]


def assert_same(page: dict[str, Any], agent: dict[str, Any]) -> None:
    """All integers are equal. The loss is a sum of float32 numbers of two builds of the runtime."""
    assert page == agent | {"loss_sum": pytest.approx(agent["loss_sum"], rel=1e-5)}
