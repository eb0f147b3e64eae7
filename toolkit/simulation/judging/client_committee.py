"""The committee of clients that judges the new model of a simulated round.

See `toolkit/aggregation/committee.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from device_agent.data.local_data import LocalData
from device_agent.formats.evaluation_counts import EvaluationCounts
from toolkit.aggregation.committee import Committee, rise
from toolkit.aggregation.federation import Federation
from toolkit.simulation.simulation_config import SimulationConfig
from toolkit.simulation.torch_executor import TorchExecutor

LIE = 1000.0
"""If a model lowers the loss of a hostile member, the member claims that its loss rises by this
factor. If a model raises the loss, the member claims that the model makes no errors."""


@dataclass
class ClientCommittee:
    """Draws the committee of each round, and lets it judge the global model of `federation`.

    Attributes:
        config: The federation's file.
        federation: The global model.
        data: The samples of a client.
        hostile: Clients that vote against their own findings.
        executors: Evaluates the submodels; each is traced once.
    """

    config: SimulationConfig
    federation: Federation
    data: Callable[[int], LocalData]
    hostile: frozenset[int] = frozenset()
    executors: dict[str, TorchExecutor] = field(default_factory=dict)

    def judge(
        self, round_: int, specs: Mapping[int, str], before: Mapping[int, EvaluationCounts]
    ) -> Committee:
        """The votes of the committee of `round_` about the present global model.

        Args:
            round_: The round that made the model.
            specs: The submodel of each client of the round.
            before: The counts of the model before the round, by client. Only these clients can be
                members.
        """
        most = self.config.evaluation.committee
        able = sorted(client for client, counts in before.items() if counts.counted)
        # The last number separates these draws from all others.
        draw = np.random.default_rng([self.config.simulation.seed, round_, 5])
        asked = draw.permutation(able)[:most].tolist()
        found = {n: rise(before[n], self._counts(n, specs, round_)) for n in asked}
        rises = {n: value for n, value in found.items() if value is not None}
        for client in self.hostile & rises.keys():
            rises[client] = -1.0 if rises[client] > 0 else LIE
        return Committee(len(asked), rises)

    def _counts(self, client: int, specs: Mapping[int, str], round_: int) -> EvaluationCounts:
        """The counts of the global model as `client` receives it in the next round."""
        spec, request = specs[client], self.config.evaluation.request
        assert request is not None  # the file asks for a share
        if spec not in self.executors:
            self.executors[spec] = TorchExecutor(self.federation.submodel(spec))
        executor = self.executors[spec]
        bundle = executor.bundle(self.federation.model, 1.0, round_ + 1)
        return executor.judge(bundle, self.data(client), request)
