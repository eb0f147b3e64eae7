"""Chooses the hostile clients, shares their samples among them, and makes their updates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from device_agent.data.local_data import LocalData
from toolkit.coordinator.federation_file.hostile_table import HostileTable
from toolkit.simulation.attacks.attack import Arrays, Poison, Trained
from toolkit.simulation.attacks.attack_table import ATTACKS
from toolkit.simulation.attacks.poisoned_samples import backdoor_samples
from toolkit.simulation.torch_executor import ClientUpdate

MOST_KNOWN = 5
"""The most clients whose samples a colluding client knows: it trains on the samples of each."""


class Known(NamedTuple):
    """The number of a client, and its samples."""

    number: int
    data: LocalData


def hostile_clients(table: HostileTable | None, clients: int, seed: int) -> frozenset[int]:
    """The numbers of the hostile clients among `clients`. The draw depends only on the seed."""
    if table is None:
        return frozenset()
    # The third number separates this draw from those of the sampling and of the failures.
    draw = np.random.default_rng([seed, 0, 2])
    return frozenset(draw.choice(clients, table.clients(clients), replace=False).tolist())


def known_to(number: int, hostile: frozenset[int], table: HostileTable) -> list[int]:
    """The clients whose samples the hostile client `number` uses; empty if it uses only its own."""
    match ATTACKS[table.attack].knows:
        case "own":
            return []
        case "first":
            return [min(hostile)]
        case "several":
            return [number, *sorted(hostile - {number})][:MOST_KNOWN]


@dataclass(frozen=True)
class HostileTraining:
    """The training of hostile clients.

    Attributes:
        table: The table `hostile`.
        seed: The seed of the simulation.
        highest: The highest label; None if labels are not classes.
        held_out: Samples and labels to evaluate the global model. The trigger of a backdoor is the
            largest number in these samples.
    """

    table: HostileTable
    seed: int
    highest: int | None
    held_out: tuple[np.ndarray, np.ndarray]

    def update(
        self,
        round_: int,
        own: Known,
        known: Sequence[Known],
        received: Arrays,
        train: Callable[[int, LocalData], ClientUpdate],
    ) -> ClientUpdate:
        """Return the update that the client `own` sends.

        Args:
            round_: The round.
            own: The client.
            known: The clients of `known_to`.
            received: The tensors that `own` received.
            train: A function of a client's number and samples. It trains on these samples, with the
                seed that belongs to the number.
        """
        attack = ATTACKS[self.table.attack]
        number, data = known[0] if attack.knows == "first" else own
        if attack.poison is not None:
            data = attack.poison(data, self._poison())
        update = train(number, data)
        others: Sequence[Arrays] = []
        if attack.knows == "several" and len(known) > 1:
            others = [update.tensors, *(train(*other).tensors for other in known[1:])]
        elif attack.knows == "several":
            others = [train(own.number, half).tensors for half in halves(data)]
        strength = attack.strength if self.table.strength is None else self.table.strength
        draw = np.random.default_rng([self.seed, own.number, round_, 3])
        honest = update.record, update.tensors
        record, tensors = attack.forge(Trained(received, honest, others, strength, draw, self.seed))
        return update._replace(record=record, tensors={**tensors})

    def triggered(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Samples and labels to measure the success of a backdoor; None for other attacks."""
        if self.table.attack != "backdoor":
            return None
        return backdoor_samples(*self.held_out, self._poison().trigger)

    def _poison(self) -> Poison:
        assert self.highest is not None  # `check_attack` refuses other labels
        x, _ = self.held_out
        trigger = float(x.max()) if self.table.attack == "backdoor" else 0.0
        return Poison(self.highest, trigger)


def halves(data: LocalData) -> list[LocalData]:
    """Two halves of the samples, from which a single client estimates standard deviations.

    Batch norm needs two samples, so fewer than four samples are not divided.
    """
    rows = np.arange(len(data))
    parts = [rows[::2], rows[1::2]] if len(rows) >= 4 else [rows]
    return [replace(data, x=data.samples(part), y=data.labels(part), mapped=()) for part in parts]
