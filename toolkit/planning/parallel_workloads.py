"""Computes the workloads of all candidates of one model in several processes.

An export of a submodel takes seconds to a minute on one core, and exports are independent. Exports
run in separate processes, because the server exports bundles at the same time and tracing in torch
is not safe in two threads.
"""

import functools
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from device_agent.formats.protocol.fleet import Preparation
from device_agent.log_format import quieten_others
from exporters.recording.inputs.sample_range import NO_INPUTS, Inputs
from profiles.cost_model.prediction import predict_memory
from profiles.documents.calibration_record import MemoryOverhead
from profiles.errors import LimitError
from profiles.text_formatting import counted, format_bytes
from toolkit.planning.candidate_specs import specs
from toolkit.planning.submodel_workloads import Impossible, Known, Workloads
from toolkit.submodels.hyperparameters import TrainingConfig
from toolkit.submodels.model_loading import load_global

logger = logging.getLogger(__name__)

TENSORS_ALONE = MemoryOverhead(idle_bytes=0, session_bytes=0, node_bytes=0)
"""A lower bound of the overhead of any device: only tensors need memory."""
LOOK_S = 0.2
"""How often the search checks for a request to stop, in seconds."""

T = TypeVar("T")


@dataclass(frozen=True)
class ModelSource:
    """What a process needs to load the model: the arguments of `load_global` and `Workloads`."""

    reference: str
    sample_shape: tuple[int, ...]
    training: TrainingConfig
    weights: Path | None = None
    seed: int = 0
    inputs: Inputs = NO_INPUTS


@dataclass(frozen=True)
class TooLarge:
    """A submodel that needs at least `bytes` of memory, more than any device may use."""

    submodel: str
    bytes: int


Outcome = Known | Impossible | TooLarge


class StoppedError(Exception):
    """The search was stopped before its end."""


@dataclass
class Search:
    """A search for the workloads of all candidates of a model.

    Attributes:
        source: The model.
        limit_bytes: The largest memory that any device may use. Submodels whose tensors need more
            are not exported. None for no limit.
        progress: Called when the export of a submodel begins.
        stopping: Set it from another thread to end the search.
        candidates: The submodels to look at. None means all that `candidate_specs` lists.
        processes: How many submodels to export at the same time.
    """

    source: ModelSource
    limit_bytes: int | None
    progress: Callable[[Preparation], None]
    stopping: threading.Event
    candidates: tuple[str, ...] | None = None
    processes: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))

    def run(self) -> tuple[list[Known], tuple[Impossible, ...]]:
        """Read the workloads from the cache, or export the submodels.

        If all submodels are too large, the smallest is exported, so that a refused device learns
        how much memory it lacks.

        Returns:
            The workloads, and the submodels that are not possible.

        Raises:
            StoppedError: If `stopping` was set.
            LimitError: If the processes are killed, usually for lack of memory.
        """
        results: dict[str, Outcome | None] = {}
        try:
            self._search(results, self.processes)
        except BrokenProcessPool:
            # Parallel exports need more memory than one at a time.
            logger.warning(
                "A process that exports submodels was killed: continuing with one process."
            )
            try:
                self._search(results, 1)
            except BrokenProcessPool:
                raise LimitError(
                    "The process that exports submodels was killed, probably because memory ran "
                    "out. Plan on a machine with more memory, or set `submodel` for every kind of "
                    "device.",
                    code="plan.process-killed",
                ) from None
        known = [result for result in results.values() if isinstance(result, Known)]
        impossible = [result for result in results.values() if isinstance(result, Impossible)]
        impossible += [
            Impossible(
                submodel=result.submodel,
                reason=f"it needs at least {format_bytes(result.bytes)} of memory, "
                "more than any device may use",
            )
            for result in results.values()
            if isinstance(result, TooLarge)
        ]
        return known, tuple(impossible)

    def _search(self, results: dict[str, Outcome | None], processes: int) -> None:
        """Fill `results`. Raises BrokenProcessPool if one of the `processes` is killed."""
        with _pool(processes) as pool:
            if not results:
                results |= self._result(_submit(pool, _remembered, self.source, self.candidates))
            new = [spec for spec, known in results.items() if known is None]
            if new:
                count = min(processes, len(new))
                logger.info(
                    "%d of %s to export, seconds to a minute each, on %s.",
                    len(new), counted(len(results), "submodel"), counted(count, "core"),
                )  # fmt: skip
                self._examine(pool, new, count, results)
            large = [result for result in results.values() if isinstance(result, TooLarge)]
            if large and not any(isinstance(result, Known) for result in results.values()):
                smallest = min(large, key=lambda result: result.bytes).submodel
                results[smallest] = self._result(
                    _submit(pool, _examined, self.source, smallest, None)
                )

    def _examine(
        self,
        pool: ProcessPoolExecutor,
        new: list[str],
        count: int,
        results: dict[str, Outcome | None],
    ) -> None:
        """Add the results of `_examined` for the specs `new` to `results`."""
        running: dict[Future[Outcome], str] = {}
        for number, spec in enumerate(new, 1):
            # Submit only as many exports as run at once, so that progress shows exports that have
            # begun.
            while len(running) >= count:
                self._collect(running, results)
            logger.info("Exporting %s (%d of %d).", spec, number, len(new))
            self.progress(Preparation(task="plan", submodel=spec, number=number, total=len(new)))
            running[_submit(pool, _examined, self.source, spec, self.limit_bytes)] = spec
        while running:
            self._collect(running, results)

    def _collect(
        self, running: dict[Future[Outcome], str], results: dict[str, Outcome | None]
    ) -> None:
        """Move finished results from `running` to `results`."""
        if self.stopping.is_set():
            raise StoppedError
        done, _ = wait(running, timeout=LOOK_S, return_when=FIRST_COMPLETED)
        for future in done:
            results[running.pop(future)] = future.result()

    def _result(self, future: Future[T]) -> T:
        while not future.done():
            if self.stopping.is_set():
                raise StoppedError
            wait([future], timeout=LOOK_S)
        return future.result()


@contextmanager
def _pool(count: int) -> Iterator[ProcessPoolExecutor]:
    """Provide a pool of up to `count` processes. They end with the block, even while they work."""
    # Do not fork: if another thread of this process holds a lock, the child could never get it.
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(count, context, _begin)
    try:
        yield pool
    finally:
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        pool.shutdown(wait=True, cancel_futures=True)


def _begin() -> None:
    """Prepare a new process of the pool."""
    torch.set_num_threads(1)
    quieten_others()


def _submit(pool: ProcessPoolExecutor, call: Callable[..., T], *arguments: object) -> Future[T]:
    """Run `call` in the pool, which may start a process.

    Ctrl-C reaches every process of a terminal. SIGINT is blocked in the new process, so only this
    process reacts to it and ends the others.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(call, *arguments)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@functools.cache
def _workloads(source: ModelSource) -> Workloads:
    """The model of `source`, loaded once in each process."""
    module, _ = load_global(source.reference, source.weights, source.seed, source.inputs)
    return Workloads(module, source.sample_shape, source.training)


def _remembered(
    source: ModelSource, candidates: tuple[str, ...] | None
) -> dict[str, Outcome | None]:
    """The candidates, each with its result in the cache or None."""
    workloads = _workloads(source)
    with workloads.recording:
        training = source.training
        every = specs(workloads.model, source.sample_shape, training.batch_size, training.loss)
        return {spec: workloads.remembered(spec) for spec in candidates or every}


def _examined(source: ModelSource, spec: str, limit_bytes: int | None) -> Outcome:
    """The workload of `spec`. Exports it only if its tensors may be within the limit."""
    workloads = _workloads(source)
    if limit_bytes is not None:
        least = workloads.at_least(spec)
        if isinstance(least, Impossible):
            return least
        needed = predict_memory(least.work, TENSORS_ALONE).value
        if needed > limit_bytes:
            return TooLarge(spec, round(needed))
    return workloads.of(spec)
