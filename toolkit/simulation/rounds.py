"""The rounds of a simulation: which clients train, what they train, and what becomes of it."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from device_agent.data.local_data import LocalData
from device_agent.formats.update import DIVERGED
from device_agent.training.training_options import round_seed
from profiles.errors import UpdateError
from profiles.text_formatting import counted
from toolkit.aggregation.aggregate import Received
from toolkit.aggregation.federation import Federation
from toolkit.coordinator.simulation_table import SimulationTable
from toolkit.factorization.factorizer import Factorizer
from toolkit.simulation.partition import Parts
from toolkit.simulation.results import RoundResult, RunFolder
from toolkit.simulation.simulation_config import SimulationConfig
from toolkit.simulation.torch_executor import MemoryBundle, TorchExecutor, sent_bytes

logger = logging.getLogger(__name__)
Evaluated = tuple[float | None, float]
"""Accuracy, None for a regression, and mean loss."""


@dataclass
class Simulation:
    """Everything that stays from round to round; the clients' samples are rows of `samples`.

    Attributes:
        config: The federation's file.
        folder: Where results are kept.
        federation: The global model.
        samples: All samples that clients train on.
        held_out: Samples and labels that judge the global model.
        specs: The submodel of each client.
        parts: The rows of each client.
    """

    config: SimulationConfig
    folder: RunFolder
    federation: Federation
    samples: LocalData
    held_out: tuple[np.ndarray, np.ndarray]
    specs: Sequence[str]
    parts: Parts
    executors: dict[str, TorchExecutor] = field(default_factory=dict, init=False)

    def run(self) -> None:
        """Run the rounds that are not finished yet."""
        done = len(self.folder.history)
        if done:
            logger.info("Continuing after round %d", done)
        for round_ in range(done + 1, self.config.rounds + 1):
            self.run_round(round_)

    def run_round(self, round_: int) -> None:
        """Train the round's clients one after another, fold their updates and keep the result."""
        begun = time.monotonic()
        # Factors of this round must not depend on earlier ones, which a restart does not know.
        self.federation.model = replace(self.federation.model, factorizer=Factorizer())
        table = self.config.simulation
        chosen = sampled(table, self.specs, round_)
        trained = _Round(self, round_)
        accuracy, loss = trained.alone(chosen) if table.is_local else trained.together(chosen)
        result = RoundResult(
            round=round_,
            accuracy=accuracy,
            loss=loss,
            local_accuracy=trained.correct / trained.judged if trained.judged else None,
            clients=len(chosen) - trained.diverged,
            diverged=trained.diverged,
            bytes_down=trained.bytes_down,
            bytes_up=trained.bytes_up,
            seconds=time.monotonic() - begun,
        )
        self.folder.finish_round(result, self.federation.save())
        logger.info(_text(result, self.config.rounds))

    def executor(self, spec: str) -> TorchExecutor:
        """The executor of `spec`, made once."""
        if spec not in self.executors:
            self.executors[spec] = TorchExecutor(self.federation.submodel(spec))
        return self.executors[spec]

    def client_data(self, client: int) -> LocalData:
        """The samples of `client`."""
        rows = self.parts[client]
        return LocalData(self.samples.samples(rows), self.samples.labels(rows))


@dataclass
class _Round:
    """The clients of one round, of which one update is in memory at a time.

    `judged` samples that clients held out were judged by their own models, `correct` of them right.
    """

    simulation: Simulation
    number: int
    diverged: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    judged: int = 0
    correct: int = 0
    bundles: dict[str, MemoryBundle] = field(default_factory=dict)

    def together(self, chosen: Sequence[tuple[int, str]]) -> Evaluated:
        """Fold the updates of all clients into the global model, and evaluate it."""
        self.simulation.federation.fold(self.updates(chosen))
        return self.simulation.federation.evaluate(*self.simulation.held_out)

    def alone(self, chosen: Sequence[tuple[int, str]]) -> Evaluated:
        """Each client continues its own model. The result is the mean of their evaluations."""
        simulation, federation = self.simulation, self.simulation.federation
        first, found = federation.model, []
        for client, spec in chosen:
            own = simulation.folder.own_model(client)
            if own is not None:
                federation.load(own)
            self.bundles.clear()
            with self.leaving_out_diverged(client):
                federation.fold([self.train(client, spec)])
                found.append(federation.evaluate(*simulation.held_out))
                simulation.folder.keep_own_model(client, self.number, federation.save())
            federation.model = first
        self.check_some_trained(len(chosen))
        self.bytes_down = self.bytes_up = 0
        accuracies = [accuracy for accuracy, _ in found if accuracy is not None]
        mean = float(np.mean(accuracies)) if accuracies else None
        return mean, float(np.mean([loss for _, loss in found]))

    def updates(self, chosen: Sequence[tuple[int, str]]) -> Iterator[Received]:
        """Train the clients; those that diverge are left out."""
        for client, spec in chosen:
            with self.leaving_out_diverged(client):
                yield self.train(client, spec)
        self.check_some_trained(len(chosen))

    @contextmanager
    def leaving_out_diverged(self, client: int) -> Iterator[None]:
        """Count and report a training that diverges."""
        try:
            yield
        except UpdateError as error:
            self.diverged += 1
            logger.warning("Client %d is left out of round %d: %s", client, self.number, error)

    def check_some_trained(self, clients: int) -> None:
        """Raise UpdateError if every training diverged."""
        if self.diverged == clients:
            raise UpdateError(DIVERGED, code="update.diverged")

    def train(self, client: int, spec: str) -> Received:
        """Train one client and keep its personal model."""
        simulation = self.simulation
        executor = simulation.executor(spec)
        table = simulation.config.simulation
        if spec not in self.bundles:
            factor = simulation.config.training.rate_factor(self.number)
            self.bundles[spec] = executor.bundle(simulation.federation.model, factor)
        bundle = self.bundles[spec]
        self.bytes_down += sent_bytes(bundle.values, executor.submodel.program.int8)
        seed = round_seed(round_seed(table.seed, client), self.number)
        folder = simulation.folder
        personal = folder.personal(client) if bundle.has_personal_model else {}
        local = simulation.client_data(client)
        update = executor.train(bundle, local, seed, personal, table.validation)
        folder.keep_personal(client, self.number, update.personal)
        self.bytes_up += sent_bytes(update.tensors)
        if update.evaluation is not None and update.evaluation.correct is not None:
            self.judged += update.evaluation.counted or update.evaluation.samples
            self.correct += update.evaluation.correct
        return update.record, update.tensors


def sampled(table: SimulationTable, specs: Sequence[str], round_: int) -> list[tuple[int, str]]:
    """The clients that take part in `round_`, at least one, ascending, each with its submodel."""
    count = max(1, round(table.participation * len(specs)))
    draw = np.random.default_rng([table.seed, round_])
    clients = sorted(draw.choice(len(specs), count, replace=False).tolist())
    # With dynamic capacities a client has the submodel of a client drawn at random.
    dynamic = table.capacities == "dynamic"
    shown = draw.integers(len(specs), size=count).tolist() if dynamic else clients
    return [(client, specs[place]) for client, place in zip(clients, shown, strict=True)]


def _text(result: RoundResult, rounds: int) -> str:
    """A line about a round for people."""
    accuracy = "" if result.accuracy is None else f"accuracy {result.accuracy:.1%}, "
    return (
        f"Round {result.round} of {rounds}: {accuracy}loss {result.loss:.4f}, "
        f"{counted(result.clients, 'client')}, {result.seconds:.2f} s"
    )
