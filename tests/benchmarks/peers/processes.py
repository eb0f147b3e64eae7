"""Processes of a federation: what they use, and the bytes between clients and server."""

import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

LIMIT_S = 1200.0
TICKS = os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    """A port that no connection gets by chance before a server listens at it."""
    while True:
        with (
            suppress(OSError),
            socket.create_server(("127.0.0.1", random.randrange(20_000, 30_000))) as taken,
        ):
            return int(taken.getsockname()[1])


def until(condition: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {limit_s:g} s until {what}")
        time.sleep(0.1)


def descendants(process: int) -> Iterator[int]:
    """`process` and those that it has started, and they in turn."""
    yield process
    for tasks in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # it has ended
            for child in map(int, tasks.read_text().split()):
                yield from descendants(child)


def memory(process: int) -> int:
    """Bytes of a process with its descendants: what is their own, and the most mapped files of one.

    They map the same libraries, which are in memory once.
    """
    own, mapped = 0, 0
    for each in descendants(process):
        with suppress(OSError):
            lines = Path(f"/proc/{each}/status").read_text().splitlines()
            kilobytes = {
                line.split(":")[0]: int(line.split()[1]) for line in lines if line[:3] == "Rss"
            }
            own += kilobytes.get("RssAnon", 0)
            mapped = max(mapped, kilobytes.get("RssFile", 0) + kilobytes.get("RssShmem", 0))
    return (own + mapped) * 1024


def processor_s(process: int) -> float:
    """Processor seconds so far of a process, of its descendants, and of those that have ended."""
    ticks = 0
    for each in descendants(process):
        with suppress(OSError):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / TICKS


class Processes:
    """Processes by name; each has a log of its name. All end with the block."""

    def __init__(self, folder: Path, variables: Mapping[str, str]) -> None:
        self.folder = folder
        self.variables = variables
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.running):
            self.kill(name)

    def start(self, name: str, arguments: Sequence[object]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [str(argument) for argument in arguments],
                cwd=self.folder,
                env={**os.environ, **self.variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, arguments: Sequence[object], where: Path | None = None) -> str:
        """Run a command to its end; returns what it said."""
        done = subprocess.run(
            [str(argument) for argument in arguments],
            cwd=where or self.folder,
            env={**os.environ, **self.variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        if done.returncode:
            raise RuntimeError(f"{arguments}: {done.stdout}{done.stderr}")
        return done.stdout

    def kill(self, name: str) -> None:
        """`kill -9` of the process and of all that it has started."""
        process = self.running.pop(name)
        for each in list(descendants(process.pid)):
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        process.wait()

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""


class Wire:
    """Passes connections on to a port of this machine and counts their bytes in each direction."""

    def __init__(self, to: int) -> None:
        self.to, self.up, self.down = to, 0, 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client = self._server.accept()[0]
                try:
                    server = socket.create_connection(("127.0.0.1", self.to))
                except OSError:  # the server is not there
                    client.close()
                    continue
                for pair in ((client, server, "up"), (server, client, "down")):
                    threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, direction: str) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                setattr(self, direction, getattr(self, direction) + len(data))
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Watched:
    """The peak of a client's memory, looked at every 20 ms."""

    def __init__(self, process: int) -> None:
        self.peak, self._ending = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(process,), daemon=True)
        self._thread.start()

    def _watch(self, process: int) -> None:
        while not self._ending.wait(0.02):
            self.peak = max(self.peak, memory(process))

    def end(self) -> int:
        self._ending.set()
        self._thread.join()
        return self.peak
