"""Running the two commands in processes of their own, and what their errors must look like."""

import importlib
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 300.0
MODULES = {"edgetailor": "toolkit.cli", "edgetailor-agent": "device_agent.cli"}
PLAIN = {"COLUMNS": "80", "NO_COLOR": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
PRELOAD = [
    "toolkit.cli",
    "device_agent.cli",
    "device_agent.training.standalone_training",
    "toolkit.exporting.model_export",
    "toolkit.aggregation.aggregate_files",
    "toolkit.cli.printed.export_table",
    "toolkit.coordinator.server",
    "toolkit.planning.model_plan",
    "commands",
    "warm_exports",
]
EXIT_CODES = """
  Exit codes:
    0    done
    2    usage or bad input
    3    export failed
    4    verification failed
    5    nothing fits
    6    connection or authorisation
    7    measurement unstable
    8    slower or larger than allowed
    70   internal error
    130  interrupted
"""
"""How the help of both commands ends."""
NUMBER = r"\d+\.\d+"


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    def succeeded(self) -> Self:
        """Fail unless the command succeeded."""
        assert self.code == 0, self.stderr
        return self


Agent = Callable[..., Done]
"""Runs `edgetailor-agent` with the arguments that it is given."""


def command(name: str, *arguments: object) -> list[str]:
    """The command line of `edgetailor` or `edgetailor-agent` from this checkout."""
    return [sys.executable, "-m", MODULES[name], *map(str, arguments)]


def environment(**more: str) -> dict[str, str]:
    """This process's environment, with 80 plain columns and this checkout importable."""
    return {**os.environ, **PLAIN, "PYTHONPATH": str(ROOT), **more}


def run(name: str, *arguments: object, cwd: Path, **more: str) -> Done:
    """Run a command to its end in a fresh process; `more` are environment variables."""
    return _ended(command(name, *arguments), cwd, LIMIT_S, more)


def run_code(
    code: str, *arguments: object, cwd: Path = ROOT, limit_s: float = LIMIT_S, **more: str
) -> Done:
    """Run Python code to its end in a fresh process; `more` are environment variables."""
    return _ended([sys.executable, "-c", code, *map(str, arguments)], cwd, limit_s, more)


def _ended(line: Sequence[str], cwd: Path, limit_s: float, more: Mapping[str, str]) -> Done:
    done = subprocess.run(
        line, cwd=cwd, env=environment(**more), capture_output=True, text=True, timeout=limit_s
    )
    return Done(done.returncode, done.stdout, done.stderr)


def interrupted(name: str, *arguments: object, cwd: Path, after: str) -> Done:
    """Ctrl-C a command once its stderr has said `after`. It must end long before its next try."""
    process = subprocess.Popen(
        command(name, *arguments),
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        said = ""
        while after not in said:
            line = process.stderr.readline()
            assert line, f"ended without {after!r}: {said}"
            said += line
        process.send_signal(signal.SIGINT)
        stdout, rest = process.communicate(timeout=30)
        return Done(process.returncode, stdout, said + rest)
    finally:
        process.kill()
        process.wait()


def edgetailor(*arguments: object, cwd: Path, **more: str) -> Done:
    """Run `edgetailor` in a process forked from one that has torch loaded already.

    Loading torch and its first export take many seconds. `more` are environment variables.
    """
    return run_forked("edgetailor", *arguments, cwd=cwd, **more)


def run_forked(name: str, *arguments: object, cwd: Path, **more: str) -> Done:
    """Run a command to its end in a process forked from one that has all libraries loaded."""
    with TemporaryDirectory() as scratch:  # tests in other processes may share `cwd`
        outputs = [Path(scratch, "stdout"), Path(scratch, "stderr")]
        child = forked(_run, name, list(map(str, arguments)), cwd, outputs, more)
        child.join(LIMIT_S)
        if child.exitcode is None:
            child.kill()
            raise TimeoutError(f"{name} {arguments} took more than {LIMIT_S:.0f} s")
        stdout, stderr = (path.read_text() for path in outputs)
    return Done(child.exitcode, stdout, stderr)


def forked(function: Callable[..., object], *arguments: object) -> BaseProcess:
    """Start a function of a shared module in a process forked from one that has torch loaded."""
    child = warm_context().Process(target=function, args=arguments)
    child.start()
    return child


def warm_context() -> ForkServerContext:
    """Processes that are forked from one that has all libraries loaded, which runs then."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    # Python 3.11 does not give the path of imports to the process that others are forked from.
    with patch.dict(os.environ, PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'tests'}"):
        forkserver.ensure_running()
    return context


def free_port() -> int:
    """A port of this machine that is free at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@contextmanager
def kept_killing(
    serve: Callable[[Path], None], folder: Path, draw: random.Random, kills: int = 12
) -> Iterator[Callable[[], int]]:
    """A coordinator that `serve` runs in `folder`, killed at random moments and started again.

    Gives how often it was killed. After `kills` times it is left alone.
    """
    # Forked from a process that has loaded all: the time between two starts is short.
    context = warm_context()
    ending, killed = threading.Event(), 0

    def keep_killing() -> None:
        nonlocal killed
        while not ending.is_set():
            process = context.Process(target=serve, args=(folder,))
            process.start()
            if killed < kills:
                time.sleep(draw.uniform(0.1, 0.4))
                killed += 1
            else:
                ending.wait(60)
            process.kill()
            process.join()

    thread = threading.Thread(target=keep_killing)
    thread.start()
    try:
        yield lambda: killed
    finally:
        ending.set()
        thread.join()


def _run(
    name: str,
    arguments: Sequence[str],
    cwd: Path,
    outputs: Sequence[Path],
    more: Mapping[str, str],
) -> None:
    assert "warm_exports" in sys.modules, "modules that cannot be preloaded are left out silently"
    main = importlib.import_module(MODULES[name]).main
    for number, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.update({**PLAIN, **more})
    os.chdir(cwd)
    sys.argv = [name, *arguments]
    main()


def evaluate_there(folder: Path, module: str, expression: str, sender: Connection) -> None:
    """For `forked`: send what an expression over the names of a module in `folder` gives.

    With it goes the hash of a string, which is another in each process that was not forked.
    """
    sys.path.insert(0, str(folder))
    names = vars(importlib.import_module(module))
    sender.send((hash("edgetailor"), repr(eval(expression, names))))


STAGE = re.compile(r"\[ *\d+\.\d s\] ")
"""The elapsed time ahead of a stage."""
SERVE_STAGES = ("Starting at port ", "Loading ", "Splitting ")
"""How the lines of a coordinator that starts begin."""


def stages(done: Done) -> list[str]:
    """The stages that a command showed on stderr. Fails for any other line there."""
    lines = done.stderr.splitlines()
    assert all(STAGE.match(line) for line in lines), done.stderr
    return [STAGE.sub("", line, count=1) for line in lines]


def refusal(done: Done, code: int = 2) -> str:
    """The one sentence that a refused command says. Fails for anything else that it printed."""
    lines = done.stderr.splitlines()
    errors = [line for line in lines if line.startswith("Error: ")]
    usage = [line for line in lines if line.startswith(("Usage: ", "Try '"))]
    progress = [line for line in lines if line.startswith(("[", "epoch ", *SERVE_STAGES))]
    rest = [line for line in lines if line not in (*errors, *usage, *progress, "")]
    assert "Traceback" not in done.stderr, done.stderr
    assert len(errors) == 1, done.stderr
    assert not rest, done.stderr
    assert done.stdout == ""
    assert done.code == code, done
    return errors[0].removeprefix("Error: ")


def refused(folder: Path, *arguments: object, code: int = 2) -> str:
    """What `edgetailor` says when it refuses `arguments`; nothing in `folder` may change."""
    from bundles import everything

    before = everything(folder)
    sentence = refusal(edgetailor(*arguments, cwd=folder), code)
    after = {name: data for name, data in everything(folder).items() if "__pycache__" not in name}
    assert after == before
    return sentence
