"""A coordinator with many devices, in one process and without HTTP."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from device_agent.formats.atomic_files import fingerprint
from device_agent.formats.manifest import MANIFEST, Manifest
from device_agent.formats.update import RECORD, TENSORS, write_update
from toolkit.coordinator.closing.round_worker import RoundWorker
from toolkit.coordinator.coordinator import STARTED, restore
from toolkit.coordinator.database.device_registry import Device
from toolkit.coordinator.storage.coordinator_store import Store
from vector_fleet import MACHINE, SIZE, TWO_KINDS, VectorModel, configured, record_for


class LargeFleet:
    """A coordinator with `devices` devices in its first round, without HTTP.

    `keys` are more lines of the federation's file.
    """

    def __init__(
        self,
        folder: Path,
        devices: int,
        model: VectorModel | None = None,
        clock: Callable[[], float] = lambda: 1.0,
        keys: str = "",
    ) -> None:
        self.config = configured(folder, keys + TWO_KINDS.format(devices - 1))
        self.store = Store(self.config.state)
        self.connection = self.store._database._connection
        self.connection.execute("PRAGMA synchronous=OFF")
        registry = self.store.registry
        self.secrets: list[str] = []
        for kind, count in (("desktop", devices - 1), ("board", 1)):
            registry.set_token(kind, kind, count, 1)
            for number in range(count):
                key = f"key {kind} {number}"
                _, secret = registry.enrol(kind, key, key, json.dumps(MACHINE), lambda kind: None)
                self.secrets.append(secret)
        self.model = model or VectorModel()
        self.restart(clock)
        for number in range(devices):
            self.device(number)  # it is seen
        self.worker.turn()
        assert (self.coordinator.rounds.phase, self.store.value(STARTED)) == ("training", "yes")

    def restart(self, clock: Callable[[], float] = lambda: 1.0) -> None:
        """Begin again with what the store has, as after a restart."""
        self.coordinator = restore(self.config, self.store, clock)
        held_out = np.zeros((4, 2), np.float32), np.zeros(4, np.int64)
        self.worker = RoundWorker(self.coordinator, self.model, held_out, lambda: None)
        self.worker.resume()

    def device(self, number: int) -> Device:
        return self.coordinator.authenticate(self.secrets[number])

    def update(self, folder: Path, number: int, value: float) -> Path:
        """An update of `device(number)` in a new folder."""
        bundle, submodel = folder / "bundle", self.coordinator.submodel(self.device(number))
        for name, entry in self.coordinator.bundles[submodel].items():
            bundle.mkdir(parents=True, exist_ok=True)
            (bundle / name).write_bytes(self.store.blobs.path(entry.sha256).read_bytes())
        manifest = msgspec.json.decode((bundle / MANIFEST).read_bytes(), type=Manifest)
        out = folder / "update"
        write_update(out, record_for(manifest, bundle), {"w": np.full(SIZE, value, np.float32)})
        return out

    def send_tensors(self, number: int, data: bytes) -> None:
        """Send the bytes `data` as the tensors of `device(number)`."""
        device, sha256 = self.device(number), fingerprint(data).sha256
        round_ = self.coordinator.rounds.round
        with self.coordinator.open_upload(device, round_, sha256, 0) as received:
            assert received.write(data)
            self.coordinator.keep_upload(device, round_, received)

    def send(self, number: int, update: Path) -> None:
        """Send an update of `device(number)`."""
        self.send_tensors(number, (update / TENSORS).read_bytes())
        record = (update / RECORD).read_bytes()
        self.coordinator.take_update(self.device(number), self.coordinator.rounds.round, record)
