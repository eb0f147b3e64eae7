"""Child processes that end with the demo. If a child fails, the demo fails."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from profiles.errors import EdgeTailorError

LOOK_S = 0.1
"""Seconds between two checks of the children."""
GRACE_S = 5.0
"""How long a child may take to end, in seconds. After this time it is killed."""
PR_SET_PDEATHSIG = 1
NICENESS = 10
"""The niceness of background processes: how much they yield to other processes, at most 19."""


@dataclass(frozen=True)
class Child:
    """A process and its log file."""

    name: str
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def running(self) -> bool:
        """Whether the process is still running."""
        return self.process.poll() is None

    def failure(self) -> EdgeTailorError:
        """The error that says how the process ended, with the last line of its log."""
        code = self.process.returncode
        lines = self.log.read_text(errors="replace").split("\n")
        return EdgeTailorError(
            "{process} ended with exit code {exit_code}{signal}. Last line of {log}: {last}",
            code="demo.process-failed",
            process=self.name,
            exit_code=code,
            signal=f" ({signal.Signals(-code).name})" if code < 0 else "",
            log=str(self.log),
            last=next((line.strip() for line in reversed(lines) if line.strip()), "nothing"),
        )


class Processes:
    """The children of this process. Leaving the context ends all of them.

    Each child has a log in the folder `logs`. Each child runs in its own session, so Ctrl-C reaches
    only this process. This process then ends the children in order.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._children: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _end(self._children, GRACE_S)

    def start(
        self,
        name: str,
        module: str,
        arguments: Sequence[object],
        stdout: Path | None = None,
        *,
        background: bool = False,
    ) -> Child:
        """Run `python -m module arguments`.

        Args:
            name: The child's name in messages and of its log.
            module: The Python module to run.
            arguments: Its command-line arguments.
            stdout: The file for its standard output; the log by default.
            background: Give the child a low priority.

        Returns:
            The running child.
        """
        log = self._logs / f"{name}.log"
        with log.open("ab") as talk, stdout.open("wb") if stdout else log.open("ab") as prints:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=prints,
                stderr=talk,
                env=_environment(),
                start_new_session=True,
                preexec_fn=_go_last if background else _end_with_parent,
            )
        child = Child(name, log, process)
        self._children.append(child)
        return child

    def pause(self, seconds: float) -> None:
        """Wait for `seconds`. Raises EdgeTailorError as soon as a child fails."""
        until = time.monotonic() + seconds
        while True:
            self._check()
            left = until - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(LOOK_S, left))

    def finish(self, children: Sequence[Child], limit_s: float) -> None:
        """Wait until `children` end. Raises EdgeTailorError on failure or after `limit_s`."""
        until = time.monotonic() + limit_s
        while left := [child for child in children if child.running]:
            if time.monotonic() > until:
                raise EdgeTailorError(
                    "{process} did not end within {limit_s:.0f} s; see {log}.",
                    code="demo.process-timeout",
                    process=left[0].name,
                    limit_s=limit_s,
                    log=str(left[0].log),
                )
            self.pause(LOOK_S)
        self._check()

    def stop(self, child: Child, limit_s: float) -> None:
        """Interrupt `child`; kill it if it does not end within `limit_s` seconds."""
        self._children = [other for other in self._children if other is not child]
        _end([child], limit_s, signal.SIGINT)

    def _check(self) -> None:
        """Raise EdgeTailorError for a child that failed; forget children that have ended."""
        for child in list(self._children):
            if child.running:
                continue
            if child.process.returncode:
                raise child.failure()
            self._children.remove(child)


@contextmanager
def interruptible() -> Iterator[None]:
    """Handle SIGTERM and a closed terminal like Ctrl-C, so that children are ended."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    wanted = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is signal.SIG_DFL
    ]
    for number in wanted:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number in wanted:
            signal.signal(number, signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _environment() -> dict[str, str]:
    """This process's environment, with one thread: there are more processes than cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def _end_with_parent() -> None:
    """Make Linux end this new process when its parent ends, even if the parent was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _go_last() -> None:
    """Do as `_end_with_parent`, and let other processes go first."""
    _end_with_parent()
    os.nice(NICENESS)


def _end(
    children: Sequence[Child], limit_s: float, number: signal.Signals = signal.SIGTERM
) -> None:
    """Signal `children` and their own children; kill those that do not end in `limit_s`."""
    for child in children:
        _signal(child, number)
    until = time.monotonic() + limit_s
    try:
        for child in children:
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, until - time.monotonic()))
    finally:
        for child in children:
            _signal(child, signal.SIGKILL)
            child.process.wait()


def _signal(child: Child, number: signal.Signals) -> None:
    """Signal the session of `child` if it still runs. If not, another process may have its id."""
    if child.running:
        with suppress(ProcessLookupError):
            os.killpg(child.process.pid, number)
