"""The coordinator's port: taken before anything else, and answered while the rest is prepared."""

import errno
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from device_agent.formats.protocol import PREPARING, Problem
from profiles.errors import InputError
from toolkit.coordinator.http.connection_limits import Connection

BACKLOG = 128
RETRY_S = 5
"""How long, in seconds, a device is told to wait before it asks again."""
GRACE_S = 5
"""How long, in seconds, requests that are under way may hold up the end of a server."""
WILDCARDS = ("0.0.0.0", "::", "")


def bind(host: str, port: int, origin: Path) -> socket.socket:
    """A socket that listens there; port 0 is any free one.

    Raises InputError, naming the configuration file `origin`, where that cannot be.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        made = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise InputError(_problem(error, host, port, origin)) from None
    # Its connections take this over. asyncio would see to it itself, but not for such a socket; an
    # answer's body would wait 40 ms for its headers to be acknowledged.
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def url_of(listening: socket.socket, host: str) -> str:
    """How others reach the socket that was bound to `host`."""
    name, port = socket.gethostname() if host in WILDCARDS else host, listening.getsockname()[1]
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


@contextmanager
def preparing(listening: socket.socket) -> Iterator[None]:
    """Tell whoever asks at the socket that the coordinator prepares (503); then leave it open."""
    problem = Problem(
        code=PREPARING,
        message="The coordinator is still preparing: it looks at the model's submodels, which "
        "takes minutes the first time. Ask again soon.",
    )
    # Closed after each answer: the next request goes to whoever serves the port by then.
    headers = {"Retry-After": str(RETRY_S), "Connection": "close"}
    answer = JSONResponse(asdict(problem), 503, headers=headers)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body", False):
            pass  # a client that still sends would miss the answer
        await answer(scope, receive, send)

    server = uvicorn.Server(
        uvicorn.Config(
            app,
            lifespan="off",
            http=Connection,
            log_level="critical",
            timeout_graceful_shutdown=GRACE_S,
        )
    )
    # A copy: uvicorn closes what it is given, and connections wait in the queue meanwhile.
    thread = threading.Thread(target=server.run, args=([listening.dup()],), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


def _problem(error: OSError, host: str, port: int, origin: Path) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"Port {port} on {host} is in use: stop what uses it or set another `port` in {origin}."
        )
    if error.errno == errno.EACCES:
        return f"Port {port} is not open to you: set a `port` from 1024 up in {origin}."
    return (
        f"{host!r} is no address of this machine ({error.strerror}): set `host` in {origin} to "
        "127.0.0.1, 0.0.0.0 or one of the machine's own addresses."
    )
