"""An operator of a fleet over real sockets, and coordinators without sockets."""

from pathlib import Path

from device_agent.federation.identity.device_keys import DeviceKey
from toolkit.coordinator.coordinator import Coordinator, restore
from toolkit.coordinator.database.device_registry import Device
from toolkit.coordinator.operation.operator_client import OperatorClient
from toolkit.coordinator.server import Server
from toolkit.coordinator.storage.coordinator_store import Store
from vector_fleet import MACHINE, configured


def operator(server: Server) -> OperatorClient:
    return OperatorClient(server.url, (server.config.state / "operator.token").read_text().strip())


def coordinator_of(folder: Path) -> tuple[Coordinator, Store]:
    config = configured(folder)
    store = Store(config.state, needs_model=False)
    for kind in config.devices:
        store.registry.set_token(kind.name, kind.name, kind.places, 30)
    return restore(config, store, lambda: 1.0), store


def enrolled(coordinator: Coordinator, store: Store, kind: str, key: str) -> Device:
    device, _ = store.registry.enrol(kind, "m", key, "{}", lambda kind: None)
    coordinator.enter(device, "has joined")
    return device


def new_key() -> str:
    return DeviceKey.new().join_request("board", "m", MACHINE).public_key
