"""A round in which one device sends whatever it likes: honest trainings, the rules of a round, and
no network."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from safetensors.numpy import save

from device_agent.data.local_data import LocalData
from device_agent.formats.protocol.fleet import RoundResult
from models_for_tests import CLASSES, INPUT_SHAPE
from profiles.errors import UpdateError
from toolkit.aggregation.aggregate import Received
from toolkit.aggregation.federation import Federation
from toolkit.coordinator.closing.round_aggregation import RoundAggregation
from toolkit.coordinator.storage.coordinator_store import Store
from toolkit.simulation.torch_executor import MemoryBundle, TorchExecutor
from toolkit.submodels.hyperparameters import TrainingConfig

SPECS = ("full", "low-rank:0.5,keep=1", "slice:residual", "cp:2.0", "width:0.5", "pfedme")


class HostileFleet:
    """Devices that train `smooth_cnn` honestly, and a coordinator's aggregation of one round."""

    def __init__(self, learning_rate: float = 0.05) -> None:
        training = TrainingConfig(batch_size=8, learning_rate=learning_rate)
        self.federation = Federation("models_for_tests:smooth_cnn", INPUT_SHAPE, training, seed=5)
        self.held_out = samples(24, 0)
        self.first = self.federation.save()
        self._executors = {s: TorchExecutor(self.federation.submodel(s)) for s in SPECS}
        self._known: dict[tuple[str, int], Received] = {}

    def train(self, spec: str, seed: int) -> Received:
        """An honest update of the present model. Raises UpdateError if the training diverges."""
        executor = self._executors[spec]
        bundle = self._bundle(spec)
        done = executor.train(bundle, LocalData(*samples(16, seed)), seed, {}, 0.0)
        return done.record, done.tensors

    def received(self, spec: str) -> Mapping[str, np.ndarray]:
        """The tensors of the present model that a device with `spec` receives."""
        return self._bundle(spec).values

    def _bundle(self, spec: str) -> MemoryBundle:
        return self._executors[spec].bundle(self.federation.model, 1.0, 1)

    def first_round(self, specs: Sequence[str]) -> list[Received]:
        """Honest updates of the first model, trained once for each spec and seed."""
        self.federation.load(self.first)
        for seed, spec in enumerate(specs):
            if (spec, seed) not in self._known:
                self._known[spec, seed] = self.train(spec, seed)
        return [self._known[spec, seed] for seed, spec in enumerate(specs)]

    def fold(
        self,
        folder: Path,
        updates: Sequence[Received],
        bounded: bool = False,
        judged: bool = False,
    ) -> RoundAggregation:
        """The aggregation of `updates` of device-0, device-1, ... to the first model, done.

        It leaves out those that a coordinator would not take, and limits the others if `bounded`.
        If `judged`, it leaves out updates that make the model worse.
        """
        self.federation.load(self.first)
        store, refused = Store(folder), dict[str, str]()
        try:
            store.add_result(RoundResult(round=0, accuracy=0, loss=1, updates=0), self.first)
            for number, (record, arrays) in enumerate(updates):
                entry, device = store.blobs.put(save(dict(arrays))), f"device-{number}"
                try:
                    self.federation.check((record, arrays), device)
                except UpdateError as error:
                    refused[device] = str(error)
                else:
                    store.add_update(1, device, replace(record, file=entry))
            done = RoundAggregation(
                self.federation, store, self.held_out, 1, bounded=bounded, judged=judged
            )
            done.run()
            done.left_out |= refused
        finally:
            store.close()
        return done


def samples(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples of all classes that differ in their means."""
    draw = np.random.default_rng(seed)
    y = draw.integers(0, CLASSES, count)
    x = draw.normal(size=(count, *INPUT_SHAPE)) + y[:, None, None, None]
    return x.astype(np.float32), y.astype(np.int64)


def with_tensor(update: Received, name: str, value: np.ndarray) -> Received:
    """`update` with another value of one tensor."""
    record, arrays = update
    changed: Mapping[str, np.ndarray] = {**arrays, name: value}
    return record, changed
