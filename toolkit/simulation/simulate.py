"""The rounds of a simulation. This is the public function `edgetailor.simulate`."""

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from device_agent.data.local_data import LocalData, load_data
from device_agent.formats.update import DIVERGED
from device_agent.training.training_options import round_seed
from profiles.errors import InputError, UpdateError
from profiles.text_formatting import counted
from toolkit.aggregation.aggregate import Received
from toolkit.aggregation.federation import Federation
from toolkit.coordinator.federation_setup import federation
from toolkit.coordinator.round_worker import read_samples
from toolkit.coordinator.simulation_table import ALPHA, SHARDS, SimulationTable
from toolkit.factorization.factorizer import Factorizer
from toolkit.simulation.curves import draw_curves
from toolkit.simulation.partition import Parts, dirichlet_split, iid_split, shard_split
from toolkit.simulation.results import CURVES, MODEL, RoundResult, RunFolder
from toolkit.simulation.simulation_config import SimulationConfig, load_simulation
from toolkit.simulation.torch_executor import MemoryBundle, TorchExecutor, sent_bytes

logger = logging.getLogger(__name__)


def simulate(file: str | Path, out: str | Path, *, force: bool = False) -> list[RoundResult]:
    """Simulate the federation of a file on this machine, without devices.

    Each client trains exactly what an agent would train. If the simulation is killed, the same call
    continues after the last finished round. The result is the same, bit for bit, as without the
    interruption.

    Args:
        file: The federation's TOML file, with a table `[simulation]`.
        out: Folder for the results: `history.jsonl`, `curves.png`, `config.json` and
            `global.safetensors`.
        force: Replace an earlier simulation in `out`.

    Returns:
        The result of each round.

    Raises:
        InputError: The file is wrong, or `out` holds something else.
        DataError: The samples cannot be read or do not fit the model.
        ModelError: The model cannot be loaded or recorded.
        SpecError: The model cannot give a submodel.
        ExportError: A submodel cannot be traced.
        UpdateError: The training of every client of a round diverged.

    Examples:
        >>> _ = Path("fleet.toml").write_text('''
        ... model = "toolkit.models:digits_cnn"
        ... input_shape = [1, 8, 8]
        ... rounds = 2
        ... [simulation]
        ... data = "toolkit.simulation.digits:digits"
        ... participation = 0.5
        ... [[devices]]
        ... name = "phone"
        ... submodel = "width:0.25"
        ... count = 20
        ... ''')
        >>> [result.clients for result in simulate("fleet.toml", "results")]
        [10, 10]
    """
    config, folder = load_simulation(Path(file)), RunFolder(Path(out))
    settings = config.model_dump(mode="json")
    folder.read(settings, force)
    simulation = prepare(config, folder)
    folder.begin(settings, force)
    if folder.history:
        logger.info("Continuing after round %d", len(folder.history))
    for round_ in range(len(folder.history) + 1, config.rounds + 1):
        simulation.run_round(round_)
    (folder.root / MODEL).write_bytes(simulation.federation.save())
    draw_curves(folder.history, folder.root / CURVES)
    return folder.history


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

    def run_round(self, round_: int) -> None:
        """Train the round's clients one after another, fold their updates and keep the result."""
        begun = time.monotonic()
        # Factors of this round must not depend on earlier ones, which a restart does not know.
        self.federation.model = replace(self.federation.model, factorizer=Factorizer())
        clients = sampled(self.config.simulation, len(self.specs), round_)
        trained = _Round(self, round_)
        self.federation.fold(trained.updates(clients))
        accuracy, loss = self.federation.evaluate(*self.held_out)
        result = RoundResult(
            round=round_,
            accuracy=accuracy,
            loss=loss,
            clients=len(clients) - trained.diverged,
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
    """The clients of one round, of which one update is in memory at a time."""

    simulation: Simulation
    number: int
    diverged: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    bundles: dict[str, MemoryBundle] = field(default_factory=dict)

    def updates(self, clients: Sequence[int]) -> Iterator[Received]:
        """Train `clients`; those that diverge are left out."""
        for client in clients:
            try:
                yield self.train(client)
            except UpdateError as error:
                self.diverged += 1
                logger.warning("Client %d is left out of round %d: %s", client, self.number, error)
        if self.diverged == len(clients):
            raise UpdateError(DIVERGED, code="update.diverged")

    def train(self, client: int) -> Received:
        """Train one client and keep its personal model."""
        simulation, spec = self.simulation, self.simulation.specs[client]
        executor = simulation.executor(spec)
        if spec not in self.bundles:
            factor = simulation.config.training.rate_factor(self.number)
            self.bundles[spec] = executor.bundle(simulation.federation.model, factor)
        bundle = self.bundles[spec]
        self.bytes_down += sent_bytes(bundle.values)
        seed = round_seed(round_seed(simulation.config.simulation.seed, client), self.number)
        folder = simulation.folder
        personal = folder.personal(client) if bundle.has_personal_model else {}
        update = executor.train(bundle, simulation.client_data(client), seed, personal)
        folder.keep_personal(client, self.number, update.personal)
        self.bytes_up += sent_bytes(update.tensors)
        return update.record, update.tensors


def prepare(config: SimulationConfig, folder: RunFolder) -> Simulation:
    """Load model and data, and share the samples among the clients."""
    model = federation(config)
    saved = folder.model()
    if saved is not None:
        model.load(saved)
    specs = config.specs()
    program = model.submodel(specs[0]).program
    table = config.simulation
    samples = load_data(
        table.data,
        config.input_shape,
        program.labels,
        program.sample_dtype,
        program.sample_limit,
        preprocessing=config.data,
    )
    order = np.random.default_rng([table.seed, 0])
    rows = order.permutation(len(samples))
    if config.held_out is not None:
        held_out = read_samples(
            *(config.held_out, config.input_shape, config.training.labels),
            preprocessing=config.data,
        )
    else:
        count = math.ceil(table.held_out_share * len(samples))
        rows, judged = rows[count:], rows[:count]
        held_out = samples.samples(judged), samples.labels(judged)
    parts = partition(table, samples.labels(rows), len(specs), order)
    return Simulation(
        config, folder, model, samples, held_out, specs, [rows[part] for part in parts]
    )


def partition(
    table: SimulationTable, labels: np.ndarray, clients: int, order: np.random.Generator
) -> Parts:
    """Share the samples that have `labels` among `clients`, as `table` says.

    Raises InputError for too few samples, and for a partition by labels that are no classes.
    """
    if table.partition != "iid" and (labels.ndim != 1 or labels.dtype != np.int64):
        raise InputError(
            f'partition = "{table.partition}" needs one class for each sample; the labels are '
            f'{labels.dtype.name} {labels.shape}. Set partition = "iid".',
            code="simulation.no-classes",
            partition=table.partition,
        )
    if table.partition == "dirichlet":
        return dirichlet_split(labels, clients, table.alpha or ALPHA, order)
    if table.partition == "shards":
        return shard_split(labels, clients, table.shards or SHARDS, order)
    return iid_split(len(labels), clients, order)


def sampled(table: SimulationTable, clients: int, round_: int) -> list[int]:
    """The clients that take part in `round_`, at least one, ascending."""
    count = max(1, round(table.participation * clients))
    draw = np.random.default_rng([table.seed, round_])
    return sorted(draw.choice(clients, count, replace=False).tolist())


def _text(result: RoundResult, rounds: int) -> str:
    """A line about a round for people."""
    accuracy = "" if result.accuracy is None else f"accuracy {result.accuracy:.1%}, "
    return (
        f"Round {result.round} of {rounds}: {accuracy}loss {result.loss:.4f}, "
        f"{counted(result.clients, 'client')}, {result.seconds:.2f} s"
    )
