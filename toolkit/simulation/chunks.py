"""Trains chunks. A chunk is a group of clients that train the same submodel in one call."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from msgspec import UnsetType

from device_agent.data.local_data import LocalData
from device_agent.formats.evaluation_counts import LocalEvaluation
from device_agent.formats.protocol.fleet import Limited
from device_agent.training.batching import round_seed
from profiles.errors import UpdateError
from toolkit.aggregation.aggregate import Received
from toolkit.aggregation.federation import Federation
from toolkit.aggregation.limits.reference import Figures, Reference, RoundLimits
from toolkit.aggregation.limits.update_limits import limited_update
from toolkit.aggregation.partial_aggregates.partial import encode_partial
from toolkit.aggregation.privacy.budget import RoundNoise
from toolkit.aggregation.privacy.clipped_changes import add_clipped
from toolkit.aggregation.running_aggregation import Aggregation
from toolkit.aggregation.update_validation import check_update
from toolkit.evaluation_sums import Evaluation
from toolkit.simulation.attacks.hostile_clients import HostileTraining, Known
from toolkit.simulation.simulation_config import SimulationConfig
from toolkit.simulation.torch_executor import (
    Arrays,
    ClientUpdate,
    MemoryBundle,
    TorchExecutor,
    sent_bytes,
)
from toolkit.submodels.hyperparameters import TrainingConfig
from toolkit.submodels.submodel import Submodel

CHUNK_MACS = 1e9
"""A chunk gets about this many multiply-accumulates of forward passes: about 80 ms of training. Its
partial aggregate takes 3 to 5 ms for a small model."""

BATCH_MACS = 8e6
"""The fixed cost of a batch, without its samples, in multiply-accumulates: about 1 ms."""

MOST_CLIENTS = 20
"""The most clients of a chunk. Their samples and personal models are in memory together."""


@dataclass(frozen=True)
class Client:
    """A client of a chunk.

    Attributes:
        number: Its number, from 0.
        data: Its samples.
        personal: The personal tensors of its last round; empty before its first.
        own: The model of a client that trains alone, as bytes of `Federation.save`. None before
            its first round. Also None if clients train one model together.
        batches: The most batches for which it has time; None if its time is not limited.
        known: The clients whose samples a hostile client uses, see `known_to`. None if the client
            is honest.
    """

    number: int
    data: LocalData
    personal: Mapping[str, np.ndarray]
    own: bytes | None = None
    batches: int | None = None
    known: Sequence[Known] | None = None


@dataclass(frozen=True)
class Chunk:
    """Clients that train the submodel `spec`.

    `reference` is for the limits of their updates; None for no limits. If the chunk is `whole`, its
    result has single updates. With differential privacy, `noise` has the clip.
    """

    spec: str
    clients: Sequence[Client]
    reference: Reference | None = None
    whole: bool = False
    noise: RoundNoise | None = None

    @property
    def is_new_kind(self) -> bool:
        """Whether the limits need the figures of the whole round."""
        return self.reference is not None and self.spec not in self.reference.kinds


@dataclass(frozen=True)
class OwnModel:
    """The model of a client that trains alone, and its evaluation."""

    evaluation: Evaluation
    model: bytes


@dataclass
class TrainedChunk:
    """The result of training a chunk.

    Attributes:
        partial: The sum of all updates, or of their clipped changes, as the files of a partial
            aggregate. None if there is no update, if clients train alone, or if the rule is not the
            mean.
        updates: All updates by client, if the rule is not the mean, or if their limits need the
            figures of the whole round. `check_update` has accepted them.
        is_limited: Whether `updates` are already limited.
        figures: The figures of the limited updates, by client.
        limited: What the limits changed in an update, by client.
        votes: With differential privacy, the sum of the clients' votes; see `RoundNoise`.
        own: The new models of clients that train alone, by client.
        personal: The personal tensors that clients keep, by client.
        diverged: The reason why a client is left out, by client.
        bytes_down: Bytes of the tensors that the clients received.
        bytes_up: Bytes of the tensors that they sent.
        judged: Number of held-out labels on which clients evaluated their own models.
        correct: How many of these labels were predicted correctly.
        evaluations: How clients judge the received model and their own, by client.
    """

    partial: dict[str, bytes] | None = None
    updates: dict[int, Received] = field(default_factory=dict)
    is_limited: bool = True
    figures: dict[int, Figures] = field(default_factory=dict)
    limited: dict[int, Limited] = field(default_factory=dict)
    votes: float = 0.0
    own: dict[int, OwnModel] = field(default_factory=dict)
    personal: dict[int, Arrays] = field(default_factory=dict)
    diverged: dict[int, str] = field(default_factory=dict)
    bytes_down: int = 0
    bytes_up: int = 0
    judged: int = 0
    correct: int = 0
    evaluations: dict[int, LocalEvaluation] = field(default_factory=dict)

    @contextmanager
    def leaving_out_diverged(self, client: int) -> Iterator[None]:
        """Run the block, which trains `client`.

        If the training diverges, add the reason to `diverged`.
        """
        try:
            yield
        except UpdateError as error:
            self.diverged[client] = str(error)


@dataclass
class ChunkTrainer:
    """Trains chunks in one process.

    It traces a submodel once and keeps the traced graphs. It keeps the bundles of a round until the
    next round.

    Attributes:
        config: The federation's file.
        federation: The global model that the round starts from.
        held_out: Samples and labels to evaluate the models of clients that train alone.
        device: The PyTorch device on which clients are trained.
    """

    config: SimulationConfig
    federation: Federation
    held_out: tuple[np.ndarray, np.ndarray]
    device: str = "cpu"
    round: int = field(default=0, init=False)
    executors: dict[str, TorchExecutor] = field(default_factory=dict, init=False)
    bundles: dict[str, MemoryBundle] = field(default_factory=dict, init=False)

    def train(self, round_: int, chunk: Chunk) -> TrainedChunk:
        """Train the clients of `chunk` one after another."""
        if round_ != self.round:
            self.round = round_
            self.bundles.clear()
        result = TrainedChunk()
        (self._alone if self.config.simulation.is_local else self._together)(chunk, result)
        return result

    def _together(self, chunk: Chunk, result: TrainedChunk) -> None:
        """Train the clients and add their updates, with one update in memory at a time.

        Rules other than the mean, and the limits of a new kind, need all updates together. With
        differential privacy, the sum is of the clipped changes.
        """
        model, policy = self.federation.model, self.federation.policy
        aggregation = Aggregation(model, dataclasses.replace(policy, rule="mean"))
        limits = None if chunk.reference is None else RoundLimits(chunk.reference)
        result.is_limited = not chunk.is_new_kind
        for client in chunk.clients:
            update = None
            with result.leaving_out_diverged(client.number):
                update = self._update(chunk.spec, client, result)
                check_update(*update, model.tensors)
            if client.number in result.diverged or update is None:
                continue
            if limits is not None and not chunk.is_new_kind:
                update = limited_update(update, limits, model, policy)
                result.figures[client.number] = limits.figures[-1]
                if (limited := limits.limited[-1]) is not None:
                    result.limited[client.number] = limited
            if chunk.noise is not None:
                norm = add_clipped(aggregation, update, chunk.noise.clip)
                result.votes += chunk.noise.vote(norm)
            elif policy.rule == "mean" and not chunk.is_new_kind and not chunk.whole:
                aggregation.add_checked(*update)
            else:
                result.updates[client.number] = update
        if aggregation.updates:
            result.partial = encode_partial(aggregation)

    def _alone(self, chunk: Chunk, result: TrainedChunk) -> None:
        """Train each client's own model."""
        first = self.federation.model
        for client in chunk.clients:
            if client.own is not None:
                self.federation.load(client.own)
            self.bundles.clear()
            with result.leaving_out_diverged(client.number):
                self.federation.fold([self._update(chunk.spec, client, result)])
                evaluation = self.federation.evaluation(*self.held_out)
                result.own[client.number] = OwnModel(evaluation, self.federation.save())
            self.federation.model = first
        result.bytes_down = result.bytes_up = 0

    def _update(self, spec: str, client: Client, result: TrainedChunk) -> Received:
        """Train one client."""
        table = self.config.simulation
        executor = self._executor(spec)
        if spec not in self.bundles:
            factor = self.config.training.rate_factor(self.round)
            self.bundles[spec] = executor.bundle(self.federation.model, factor, self.round)
        bundle = self.bundles[spec]
        result.bytes_down += sent_bytes(bundle.values, executor.submodel.program.int8)
        asked = self.config.evaluation.request

        def train(number: int, data: LocalData) -> ClientUpdate:
            seed = round_seed(round_seed(table.seed, number), self.round)
            return executor.train(
                bundle, data, seed, client.personal, table.validation, asked, client.batches
            )

        if client.known is None:
            update = train(client.number, client.data)
        else:
            assert table.hostile is not None
            labels = executor.submodel.program.labels
            attack = HostileTraining(table.hostile, table.seed, labels.highest, self.held_out)
            own = Known(client.number, client.data)
            update = attack.update(self.round, own, client.known, bundle.values, train)
        if update.personal:
            result.personal[client.number] = update.personal
        result.bytes_up += sent_bytes(update.tensors)
        if update.validation is not None and update.validation.correct is not None:
            result.judged += update.validation.counted or update.validation.samples
            result.correct += update.validation.correct
        if not isinstance(update.record.evaluation, UnsetType):
            result.evaluations[client.number] = update.record.evaluation
        return update.record, update.tensors

    def _executor(self, spec: str) -> TorchExecutor:
        """The executor of `spec`, which is created at first use."""
        if spec not in self.executors:
            self.executors[spec] = TorchExecutor(self.federation.submodel(spec), self.device)
        return self.executors[spec]


def shared_out(
    samples: Mapping[int, int], submodel: Submodel, training: TrainingConfig
) -> list[list[int]]:
    """Divide clients of one submodel into chunks of about the same number of clients.

    The chunks depend only on the federation's file, not on the engine. So the sums of a round are
    the same, bit for bit, with every engine.

    Args:
        samples: The number of samples of each client.
        submodel: The submodel that the clients train.
        training: How the clients train.
    """
    size = training.batch_size
    if training.steps is None:
        batches = sum(math.ceil(count / size) for count in samples.values()) * training.epochs
        visited = sum(samples.values()) * training.epochs
    else:
        batches = len(samples) * training.steps
        visited = sum(min(size, count) for count in samples.values()) * training.steps
    work = visited / size * submodel.counts.macs + batches * BATCH_MACS
    chunks = max(math.ceil(work / CHUNK_MACS), math.ceil(len(samples) / MOST_CLIENTS))
    parts = np.array_split(list(samples), min(chunks, len(samples)))
    return [part.tolist() for part in parts]
