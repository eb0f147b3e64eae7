"""Trainings in processes that a test can kill at any moment.

Each training is forked from one process, so that only the first one loads the libraries.

As a program, this file reads jobs from stdin, one JSON object per line. For each job it forks a
process and writes its id. An empty line then asks for the status with which the process ended.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commands import ROOT, environment


@dataclass(frozen=True)
class Job:
    """A training of `bundle` on `data` to `out`, with a checkpoint every `checkpoint_s` seconds.

    With `evaluation`, a federation asks for counts by class. If `stop` is given, the process is
    killed before or after its write with that number. Flushes to disk, renames and deletions count
    as writes.
    """

    bundle: str
    data: str
    out: str
    personal: str | None = None
    checkpoint_s: float = 120.0
    evaluation: bool = False
    stop: int | None = None
    before: bool = True


class Trainer:
    """Runs one job at a time."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def start(self, job: Job) -> int:
        """Start `job` and return the process's id."""
        return self._request(json.dumps(vars(job)))

    def wait(self) -> int:
        """Wait for the job and return its status; a negative status is the signal that ended it."""
        return os.waitstatus_to_exitcode(self._request(""))

    def run(self, job: Job) -> int:
        """Run `job` to its end and return its status."""
        self.start(job)
        return self.wait()

    def kill(self, job: Job, after_s: float) -> int:
        """Start `job`, kill it `after_s` seconds later, and return its status."""
        process = self.start(job)
        time.sleep(after_s)
        os.kill(process, signal.SIGKILL)
        return self.wait()

    def _request(self, line: str) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the trainer has ended"
        return int(line)


@contextmanager
def training_process(folder: Path) -> Iterator[Trainer]:
    """Start a Trainer whose stderr goes to `folder`/trainer.log."""
    with (folder / "trainer.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, __file__],
            env=environment(PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests")])),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            yield Trainer(process)
        finally:
            process.kill()
            process.wait()


def die_at(job: Job) -> Callable[[], None]:
    """Make this process kill itself at the write that `job` names.

    Returns a function that counts as one write more, such as a commit of a database.
    """
    count = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: object, **options: object) -> Any:
            nonlocal count
            count += 1
            last = count == job.stop
            if last and job.before:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return call(*arguments, **options)
            finally:  # also after a write that fails, such as the deletion of a missing file
                if last:
                    os.kill(os.getpid(), signal.SIGKILL)

        return wrapped

    os.fsync, os.replace = counted(os.fsync), counted(os.replace)
    os.unlink, os.rmdir = counted(os.unlink), counted(os.rmdir)
    return counted(lambda: None)


def _do(job: Job) -> None:
    from device_agent.formats.evaluation_counts import EvaluationRequest
    from device_agent.training import schedule_interpreter
    from device_agent.training.bundle_training import train_bundle
    from device_agent.training.standalone_training import train
    from device_agent.training.training_options import TrainingOptions

    schedule_interpreter.CHECKPOINT_S = job.checkpoint_s
    die_at(job)
    if job.evaluation:
        asked = EvaluationRequest(share=0.2, by_class=True)
        train_bundle(job.bundle, job.data, job.out, TrainingOptions(threads=1, evaluation=asked))
        return
    personal = Path(job.personal) if job.personal else None
    train(job.bundle, job.data, job.out, personal=personal, threads=1)


def _serve() -> None:
    while line := sys.stdin.readline():
        job = Job(**json.loads(line))
        process = os.fork()
        if process == 0:
            code = 1
            try:
                _do(job)
                code = 0
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
            finally:
                os._exit(code)
        print(process, flush=True)
        sys.stdin.readline()  # until waitpid the system does not give the id to another process
        print(os.waitpid(process, 0)[1], flush=True)


if __name__ == "__main__":
    _serve()
