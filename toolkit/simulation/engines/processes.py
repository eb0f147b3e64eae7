"""Chunks in several processes of this machine."""

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.connection import Connection

from toolkit.simulation.chunks import Chunk, TrainedChunk
from toolkit.simulation.engines.engine import Worker, WorkerSetup, in_order, worker_died

_worker: Worker
"""That of this process, if it is a worker."""


class Processes:
    """The engine with `workers` processes, which start with the first round.

    They end when `close` is called or this process ends, however that happens: nothing is left that
    could train on.
    """

    def __init__(self, setup: WorkerSetup, workers: int) -> None:
        # A fork of a process with threads may wait forever. Where it can, a fresh process that has
        # loaded PyTorch is forked instead: workers start in no time and share its memory.
        forks = "forkserver" in get_all_start_methods()
        context = get_context("forkserver" if forks else "spawn")
        if forks:
            context.set_forkserver_preload([__name__])
        self._workers = workers
        watched, self._alive = context.Pipe(duplex=False)
        self._pool = ProcessPoolExecutor(workers, context, _begin, (setup, watched))

    def map(self, round_: int, model: bytes, chunks: Iterable[Chunk]) -> Iterator[TrainedChunk]:
        """See Engine."""

        def submit(chunk: Chunk) -> Future[TrainedChunk]:
            return self._pool.submit(_train, round_, model, chunk)

        try:
            yield from in_order(submit, chunks, self._workers)
        except BrokenProcessPool:
            raise worker_died(round_, "its process is gone") from None

    def close(self) -> None:
        """See Engine."""
        self._alive.close()
        self._pool.shutdown(cancel_futures=True)


def _begin(setup: WorkerSetup, watched: Connection) -> None:
    """Make this process a worker."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the process that closes all
    threading.Thread(target=_end_with, args=(watched,), daemon=True).start()
    _worker = Worker(setup)


def _end_with(watched: Connection) -> None:
    """End this process as soon as the other end of `watched` is closed."""
    try:
        watched.recv()
    except EOFError:
        os._exit(1)


def _train(round_: int, model: bytes, chunk: Chunk) -> TrainedChunk:
    return _worker.train(round_, model, chunk)
