"""The engine that trains chunks in Ray actors: here, or in the cluster of RAY_ADDRESS."""

import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from profiles.errors import InputError
from toolkit.simulation.chunks import Chunk, TrainedChunk
from toolkit.simulation.engines.engine import Worker, WorkerSetup, in_order, worker_died


class RayActors:
    """The engine with `workers` actors. Each actor uses one processor for each of its threads.

    If this process has not started Ray yet, the engine starts it, and `close` stops it. Files that
    the federation's file names must have the same path on all machines of a cluster. Samples and
    results are sent over the network.

    Raises:
        InputError: Ray is not installed, or has too few processors.
    """

    def __init__(self, setup: WorkerSetup, workers: int) -> None:
        check_ray()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        self._started = not ray.is_initialized()
        if self._started:
            here = "RAY_ADDRESS" not in os.environ
            path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
            ray.init(
                # Without "local", Ray would join a Ray cluster that already runs on this machine.
                address="local" if here else None,
                num_cpus=workers * setup.threads if here else None,
                include_dashboard=False if here else None,
                runtime_env={"env_vars": {"PYTHONPATH": path}},
                log_to_driver=False,
                logging_level="error",
            )
        there = int(ray.cluster_resources().get("CPU", 0))
        if there < workers * setup.threads:
            self._disconnect()
            raise too_few_processors(there, workers, setup.threads)
        actor, shared = ray.remote(num_cpus=setup.threads)(Worker), ray.put(setup)
        self._actors = [actor.remote(shared) for _ in range(workers)]
        self._free: SimpleQueue[Any] = SimpleQueue()
        for worker in self._actors:
            self._free.put(worker)
        # One thread for each actor waits for its result, so every actor has work even while the
        # result of an earlier chunk is still missing.
        self._threads = ThreadPoolExecutor(workers)

    def map(self, round_: int, model: bytes, chunks: Iterable[Chunk]) -> Iterator[TrainedChunk]:
        """See Engine."""
        import ray

        shared = ray.put(model)

        def submit(chunk: Chunk) -> Future[TrainedChunk]:
            return self._threads.submit(self._train, round_, shared, chunk)

        return in_order(submit, chunks, len(self._actors))

    def close(self) -> None:
        """See Engine."""
        import ray

        for actor in self._actors:
            ray.kill(actor)
        self._threads.shutdown(cancel_futures=True)
        self._disconnect()

    def _disconnect(self) -> None:
        """Stop Ray, or leave its cluster, unless this process used it before."""
        import ray

        if self._started:
            ray.shutdown()

    def _train(self, round_: int, model: Any, chunk: Chunk) -> TrainedChunk:
        """Train `chunk` in a free actor."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        actor = self._free.get()
        try:
            trained: TrainedChunk = ray.get(actor.train.remote(round_, model, chunk))
        except RayTaskError as error:
            raise error.cause from None
        except RayError as error:
            raise worker_died(round_, str(error).partition("\n")[0]) from None
        finally:
            self._free.put(actor)
        return trained


def check_ray() -> None:
    """Raise InputError if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise InputError(
            "The engine ray needs the package Ray. Run pip install 'edgetailor[ray]', or leave "
            "--engine out.",
            code="program.missing-package",
            package="ray",
            extra="ray",
        )


def too_few_processors(there: int, workers: int, threads: int) -> InputError:
    """The error if Ray has too few processors, so that workers would wait forever."""
    return InputError(
        "{workers} workers with {threads} threads each take {needed} processors; Ray has {found}. "
        "Lower --workers or --threads, or add machines to Ray first.",
        code="simulation.too-few-processors",
        found=there,
        needed=workers * threads,
        workers=workers,
        threads=threads,
    )
