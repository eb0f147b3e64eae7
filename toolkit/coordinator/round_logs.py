"""Logs the rounds of `serve` to MLflow or TensorBoard, as `simulate` does for its rounds.

A separate thread writes, so that no round waits for MLflow. If MLflow cannot be reached, the rounds
go on. Missing rounds are logged with the next round.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from device_agent.formats.protocol.fleet import RoundResult
from profiles.errors import InputError
from toolkit.metric_logs import Log, Logged, LogName, open_logs, quality_figures

logger = logging.getLogger(__name__)
STOP_S = 10.0
"""How long the program waits at its end for a running request to MLflow, in seconds."""
UNLOGGED = ("notify", "state", "host", "port", "tls_cert", "tls_key")
"""Settings that are not parameters of a run. An address in [notify] may contain a secret."""
RETRIES = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
"""MLflow's own defaults, 7 and 120 s, could delay the end of the service by many minutes."""


def logged(result: RoundResult) -> Logged:
    """The figures of a round. Unknown figures are left out.

    The figures of devices judge the model of this round. These figures come with the next round.
    """
    updates = sum(result.staleness)
    figures = {
        "accuracy": result.accuracy,
        "loss": result.loss,
        "updates": result.updates,
        "left_out": len(result.left_out),
        "limited": len(result.limited),
        "asked": result.asked,
        **quality_figures(result.held_out, result.devices),
    }
    if result.privacy is not None:
        figures |= {"epsilon": result.privacy.epsilon, "clip": result.privacy.clip}
    if updates:
        of_age = enumerate(result.staleness)
        figures["mean_staleness"] = sum(tau * count for tau, count in of_age) / updates
        figures["max_staleness"] = len(result.staleness) - 1
    known = {key: float(value) for key, value in figures.items() if value is not None}
    return Logged(result.round, known)


class RoundLogs:
    """Writes the rounds of `history` to `logs` after each `wake`, from a thread of its own."""

    def __init__(self, history: Callable[[], list[RoundResult]], logs: Sequence[Log]) -> None:
        self._history, self._logs = history, logs
        self._woken, self._stopping = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="round logs", daemon=True)

    def start(self) -> None:
        """Start the thread, if there is a log."""
        if self._logs:
            self._thread.start()

    def wake(self) -> None:
        """Log the new rounds soon. Returns immediately; may be called from any thread."""
        self._woken.set()

    def stop(self) -> None:
        """Log the new rounds, and end the thread."""
        self._stopping = True
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(STOP_S)

    def _run(self) -> None:
        ends = False
        while not ends:
            self._woken.wait()
            self._woken.clear()
            ends, results = self._stopping, [*map(logged, self._history())]
            for log in self._logs:
                try:
                    for result in results:
                        log(result)
                except (InputError, OSError) as error:
                    logger.warning("%s The rounds go on, and the next one tries again.", error)


@contextmanager
def round_logs(
    names: Sequence[LogName],
    folder: Path,
    history: Callable[[], list[RoundResult]],
    settings: Mapping[str, object],
) -> Iterator[RoundLogs]:
    """Open the logs `names` of the federation in `folder` until the end of the block.

    Raises InputError if MLflow's store cannot be used at the start. Later errors are only logged.
    """
    for key, value in RETRIES.items():
        os.environ.setdefault(key, value)
    begun = False
    try:
        with open_logs(names, folder, [*map(logged, history())], settings) as logs:
            begun = True
            writer = RoundLogs(history, logs)
            writer.start()
            try:
                yield writer
            finally:
                writer.stop()
    except InputError as error:
        if not begun or error.code != "simulation.mlflow":
            raise
        logger.warning("The end of the run was not logged. %s", error)
