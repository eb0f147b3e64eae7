"""The engine that trains chunks in several processes of this machine."""

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver, get_all_start_methods, get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext

from toolkit.simulation.chunks import Chunk, TrainedChunk
from toolkit.simulation.engines.engine import Worker, WorkerSetup, in_order, worker_died

_worker: Worker
"""The worker of this process, if this process is a worker."""


class Processes:
    """The engine with `workers` processes, which start with the first round.

    These processes end when `close` is called or when this process ends for any reason.
    """

    def __init__(self, setup: WorkerSetup, workers: int) -> None:
        # A fork of a process with threads may wait forever. Where possible, fork a fresh process
        # that has only loaded PyTorch: workers then start at once and share its memory.
        forks = "forkserver" in get_all_start_methods()
        context = start_forkserver() if forks else get_context("spawn")
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


def start_forkserver() -> BaseContext:
    """Start the process that workers are forked from, and wait until it has loaded PyTorch.

    The new process ignores Ctrl-C; otherwise it would print an error. It ends with this process.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    resource_tracker.ensure_running()  # otherwise the next start would do this, and unblock Ctrl-C
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    # A worker that is interrupted while PyTorch loads would print an error about its queues. This
    # empty process has no queues. When it has started, the fork server has loaded PyTorch.
    context.Process(target=int).start()
    return context


def _begin(setup: WorkerSetup, watched: Connection) -> None:
    """Make this process a worker."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles Ctrl-C
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
