"""Gives up a task with a release if the system killed the agent several times during the task."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from device_agent.federation.training_attempts import MAX_FAILURES, Attempts, TrainingFailedError
from device_agent.system.process_memory import ran_out
from profiles.errors import LimitError


class ReleaseAttempts:
    """Counts, in the file `path`, how often in a row the agent was killed during a task."""

    def __init__(self, path: Path) -> None:
        self._attempts = Attempts(path)
        with suppress(TrainingFailedError, OSError):  # only the count is needed
            self._attempts.check_last()

    @contextmanager
    def attempt(self, task: str, round_: int) -> Iterator[None]:
        """Record an attempt at `task`. The block runs the task with the model of `round_`.

        The system kills an agent that uses too much memory. Without this count, the agent would
        repeat the task after each start, and the device would never train.

        Raises:
            LimitError: The agent was killed MAX_FAILURES times during the task, or memory ran out.
        """
        if self._attempts.failures(task) >= MAX_FAILURES:
            raise LimitError(
                "The agent was killed {times} times in a row while {task}. It does not try this "
                "again. The system's log says whether memory ran out.",
                code="release.killed",
                times=MAX_FAILURES,
                task=task,
            )
        try:
            with self._attempts.attempt(task, round_):
                yield
        except TrainingFailedError as failed:
            self._attempts.forget()
            raise failed.__cause__ or failed from None
        except (MemoryError, OSError) as error:
            if ran_out(error) is None:
                raise
            raise LimitError(
                "Memory ran out while {task}. Allow more memory.",
                code="release.out-of-memory",
                task=task,
            ) from None
