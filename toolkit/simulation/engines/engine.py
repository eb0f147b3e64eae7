"""The protocol of an engine, and the worker that runs in each process of an engine."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import NamedTuple, Protocol

import numpy as np
import torch

from device_agent.log_format import quieten_others
from profiles.errors import LimitError
from toolkit.coordinator.federation_setup import federation
from toolkit.simulation.chunks import Chunk, ChunkTrainer, TrainedChunk
from toolkit.simulation.simulation_config import SimulationConfig

AHEAD = 4
"""For each worker, the most submitted chunks whose results were not taken yet."""


class Engine(Protocol):
    """Trains the chunks of a round."""

    def map(self, round_: int, model: bytes, chunks: Iterable[Chunk]) -> Iterator[TrainedChunk]:
        """Train `chunks` and yield the result of each, in their order.

        Args:
            round_: Number of the round.
            model: The global model that the round starts from, as bytes of `Federation.save`.
            chunks: The chunks. The engine takes chunks one by one, so that few are in memory.

        Raises:
            LimitError: A worker has ended.
            EdgeTailorError: The training of a chunk raised it.
        """
        ...

    def close(self) -> None:
        """End the workers immediately, whatever they are doing."""
        ...


class WorkerSetup(NamedTuple):
    """The arguments of a worker.

    Attributes:
        config: The federation's file.
        held_out: Samples and labels to evaluate the models of clients that train alone.
        threads: Threads of PyTorch in each worker.
        device: The PyTorch device on which clients are trained.
    """

    config: SimulationConfig
    held_out: tuple[np.ndarray, np.ndarray]
    threads: int
    device: str = "cpu"


class Worker:
    """Trains chunks in a separate process. It loads the model when the first chunk arrives."""

    def __init__(self, setup: WorkerSetup) -> None:
        torch.set_num_threads(setup.threads)
        # The process that prepared the simulation has already logged the notes about the file.
        logging.disable()
        quieten_others()
        self._setup = setup
        self._trainer: ChunkTrainer | None = None

    def train(self, round_: int, model: bytes, chunk: Chunk) -> TrainedChunk:
        """Train `chunk` of a round that starts from `model`."""
        if self._trainer is None:
            config = self._setup.config
            # Split a submodel when its first chunk arrives, because a worker may not need all.
            whole = federation(config.model_copy(update={"devices": ()}))
            whole.held_out = self._setup.held_out
            self._trainer = ChunkTrainer(config, whole, self._setup.held_out, self._setup.device)
        if round_ != self._trainer.round:
            self._trainer.federation.load(model)
        return self._trainer.train(round_, chunk)


def in_order(
    submit: Callable[[Chunk], Future[TrainedChunk]], chunks: Iterable[Chunk], workers: int
) -> Iterator[TrainedChunk]:
    """Submit chunks in advance, and yield their results in the order of the chunks."""
    waiting: deque[Future[TrainedChunk]] = deque()
    for chunk in chunks:
        waiting.append(submit(chunk))
        if len(waiting) >= AHEAD * workers:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def worker_died(round_: int, reason: str) -> LimitError:
    """The error for a worker that has ended in round `round_`."""
    return LimitError(
        "A worker of the simulation ended in round {round}: {reason}. Usually the system stops a "
        "process because memory is short. Finished rounds are kept: run the same command again to "
        "continue, with fewer --workers if memory is short.",
        code="simulation.worker-died",
        round=round_,
        reason=reason,
    )
