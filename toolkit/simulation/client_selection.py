"""Selects the clients of each simulated round, by the policies of `serve`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from toolkit.coordinator.rounds.selection_policies import Candidate, selected
from toolkit.simulation.simulation_config import SimulationConfig

Choices = Mapping[str, Sequence[str]]
"""Maps a client's own submodel to the submodels that the client may train in a round. Without an
entry, the client trains only its own submodel."""


@dataclass
class ClientSelection:
    """Selects the clients of each round. The draws depend only on the seed and the round.

    Attributes:
        config: The federation's file.
        specs: The submodel of each client.
        samples: The number of samples of each client.
        choices: Maps a client's submodel to the submodels from which it draws one in each round.
        kinds: The name of the kind of each client; empty if unknown.
        candidates: Returns the clients that a round may ask; None for all.
    """

    config: SimulationConfig
    specs: Sequence[str]
    samples: Sequence[int]
    choices: Choices = field(default_factory=dict)
    kinds: Sequence[str] = ()
    candidates: Callable[[int], Sequence[int]] | None = None
    _last_rounds: list[int] = field(default_factory=list, init=False)
    _round: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._restart()

    @property
    def asked(self) -> int:
        """How many clients each round asks, at least one."""
        config, clients = self.config, len(self.specs)
        wanted = config.updates_wanted(clients)
        if wanted is None:
            return max(1, round(config.simulation.participation * clients))
        # With a baseline, no client fails or is late.
        return min(clients, wanted if config.simulation.baseline else config.devices_asked(wanted))

    @property
    def probability(self) -> float:
        """With differential privacy, each client is asked with this probability, independently."""
        return self.asked / len(self.specs)

    @property
    def expected(self) -> dict[str, float]:
        """With differential privacy, how many clients of each submodel a round asks on average."""
        numbers: dict[str, float] = {}
        for own in self.specs:
            drawn = self.choices.get(own, (own,))
            for spec in drawn:
                numbers[spec] = numbers.get(spec, 0.0) + self.probability / len(drawn)
        return numbers

    def clients(self, round_: int) -> list[tuple[int, str]]:
        """The number and the submodel of each client of `round_`, in the order of the numbers.

        If the submodel of a client has `choices`, the client trains one of them, drawn at random.

        Raises:
            DataError: The user's policy cannot be loaded.
            InputError: The user's policy fails, or returns something else than clients.
        """
        if round_ <= self._round:
            self._restart()
        # A policy may depend on the previous rounds, also after a restart of the simulation.
        while self._round < round_ - 1:
            self._select(self._round + 1)
        return self._with_submodels(*self._select(round_))

    def _restart(self) -> None:
        self._last_rounds, self._round = [0] * len(self.specs), 0

    def _select(self, round_: int) -> tuple[list[int], np.random.Generator]:
        """Select the clients of the next round. Returns them with the generator of the round."""
        draw = np.random.default_rng([self.config.simulation.seed, round_])
        kinds = self.kinds or [""] * len(self.specs)
        here = (
            range(len(self.specs)) if self.candidates is None else self.candidates(self._round + 1)
        )
        candidates = [
            Candidate(
                f"client-{number}", kinds[number], self.samples[number], self._last_rounds[number]
            )
            for number in here
        ]
        if self.config.device_privacy is None:
            positions = selected(self.config.selection, draw, candidates, self.asked)
        else:
            positions = np.flatnonzero(draw.random(len(here)) < self.probability).tolist()
        chosen = [here[position] for position in positions]
        for number in chosen:
            self._last_rounds[number] = round_
        self._round = round_
        return chosen, draw

    def _with_submodels(
        self, clients: list[int], draw: np.random.Generator
    ) -> list[tuple[int, str]]:
        # With dynamic capacities, a client gets the submodel of a randomly drawn client.
        dynamic = self.config.simulation.capacities == "dynamic"
        shown = draw.integers(len(self.specs), size=len(clients)).tolist() if dynamic else clients
        own = [self.specs[number] for number in shown]
        trained = [
            self.choices[spec][int(draw.integers(len(self.choices[spec])))]
            if spec in self.choices
            else spec
            for spec in own
        ]
        return list(zip(clients, trained, strict=True))
