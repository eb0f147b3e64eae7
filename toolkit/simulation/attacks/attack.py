"""The type of an attack, the knowledge of a hostile client, and how it forges an update."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from device_agent.data.local_data import LocalData
from device_agent.formats.manifest import TensorEntry
from toolkit.aggregation.recover import Received
from toolkit.aggregation.update_validation import is_variance

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Trained:
    """The knowledge of a hostile client after its training.

    Attributes:
        received: The tensors that the client received, by their names in the bundle.
        update: The update that an honest client would send. The samples may be poisoned.
        known: For each hostile client whose samples this client knows, the tensors after a
            training on these samples from `received`. Empty if the attack does not use them.
        strength: The strength of the attack.
        draw: The client's random numbers in this round.
        seed: A number that all hostile clients know.
    """

    received: Arrays
    update: Received
    known: Sequence[Arrays]
    strength: float
    draw: np.random.Generator
    seed: int

    def change(self, name: str) -> np.ndarray:
        """How far the training moved the tensor `name`, float64."""
        return self.update[1][name].astype(np.float64) - self.received[name]


class Poison(NamedTuple):
    """The values that a hostile client needs to poison its samples.

    `highest` is the highest label. `trigger` is the number that marks a sample of a backdoor.
    """

    highest: int
    trigger: float


class Attack(NamedTuple):
    """An attack.

    Attributes:
        forge: Returns the update that the client sends.
        strength: The default of the table's `strength`.
        poison: Returns the samples that the client trains on; None if it trains on its own samples.
        knows: The samples that each hostile client knows: its own, the samples of the first hostile
            client, or the samples of several hostile clients.
    """

    forge: Callable[[Trained], Received]
    strength: float
    poison: Callable[[LocalData, Poison], LocalData] | None = None
    knows: Literal["own", "first", "several"] = "own"


def forged(trained: Trained, value: Callable[[TensorEntry], np.ndarray]) -> Received:
    """The update with `value` for each tensor. A variance below 0 becomes 0.

    A coordinator refuses negative variances, so a hostile device would not send any.
    """
    record, arrays = trained.update
    tensors = {}
    for entry in record.tensors:
        new = value(entry)
        if is_variance(entry.stands_for or ""):
            new = np.maximum(new, 0)
        with np.errstate(over="ignore"):  # a device may send infinities
            tensors[entry.name] = new.astype(arrays[entry.name].dtype)
    return record, tensors


def rms(values: np.ndarray) -> float:
    """The root of the mean of the squares."""
    return float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0
