"""Binds the coordinator's port, and answers requests while the coordinator is still starting."""

import asyncio
import errno
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import uvicorn
from starlette.responses import JSONResponse
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from device_agent.formats.protocol.problems import PREPARING, Problem
from profiles.errors import InputError
from toolkit.coordinator.http.certificates import Certificate
from toolkit.coordinator.http.connection_limits import connections, most_connections
from toolkit.coordinator.http.open_connections import OpenConnections
from toolkit.coordinator.minute_log import MinuteLog
from toolkit.web.built_page import Page
from toolkit.web.static_files import join_routes

BACKLOG = 128
HEALTH = "/healthz"
RETRY_S = 5
"""How long a device waits before it asks again, in seconds."""
GRACE_S = 5
"""How long running requests may delay the end of a server, in seconds."""
WILDCARDS = ("0.0.0.0", "::", "")


def bind(host: str, port: int, origin: Path) -> socket.socket:
    """Create a listening socket. Port 0 chooses a free port.

    Raises InputError, which names the configuration file `origin`, if the socket cannot be bound.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise _not_bound(error, host, port, origin) from None
    # Connections inherit this option. asyncio sets it only on sockets that it created itself.
    # Without this option, an answer's body waits 40 ms for the acknowledgement of its headers.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def uvicorn_server(
    app: ASGIApp, protocol: Callable[..., asyncio.Protocol], lifespan: Literal["on", "off"] = "on"
) -> uvicorn.Server:
    """Create a server. `protocol` creates each of its connections."""
    settings = uvicorn.Config(
        app,
        lifespan=lifespan,
        ws="none",  # OpenConnections does not see the connections of websockets
        log_level="critical",  # RequestLimits logs failures
        timeout_graceful_shutdown=GRACE_S,
    )
    settings.load()
    settings.http_protocol_class = protocol  # type: ignore[assignment]  # uvicorn only calls it
    return uvicorn.Server(settings)


def url_of(listening: socket.socket, host: str, scheme: str = "http") -> str:
    """The URL by which other machines reach the socket that was bound to `host`."""
    name, port = socket.gethostname() if host in WILDCARDS else host, listening.getsockname()[1]
    return f"{scheme}://[{name}]:{port}" if ":" in name else f"{scheme}://{name}:{port}"


@contextmanager
def answer_preparing(
    listening: socket.socket, certificate: Certificate | None = None, page: Page | None = None
) -> Iterator[None]:
    """During the block, serve the files of `page` and HEALTH; answer other requests with 503.

    The socket stays open.
    """
    problem = Problem(
        code=PREPARING,
        message="The coordinator is starting: it loads and splits the model. Ask again soon.",
    )
    # Close connections after each answer, so that the next request can reach the coordinator when
    # it serves.
    closing = {"Connection": "close"}
    answer = JSONResponse(asdict(problem), 503, headers=closing | {"Retry-After": str(RETRY_S)})
    alive = Route(HEALTH, lambda request: JSONResponse("ok", headers=closing))
    routes = [alive, *(join_routes(page, closing) if page is not None else [])]
    router = Router(routes, default=answer)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body", False):
            pass  # a client that is still sending would miss the answer
        await router(scope, receive, send)

    opened = OpenConnections(MinuteLog(), most_connections)
    server = uvicorn_server(app, connections(opened, certificate), lifespan="off")
    # A copy, because uvicorn closes its socket. New connections wait in the queue of the original.
    thread = threading.Thread(target=server.run, args=([listening.dup()],), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


def _not_bound(error: OSError, host: str, port: int, origin: Path) -> InputError:
    if error.errno == errno.EADDRINUSE:
        return InputError(
            "Port {port} on {host} is in use: stop the program that uses it, or set another `port` "
            "in {origin}.",
            code="service.port-in-use",
            port=port,
            host=host,
            origin=origin,
        )
    if error.errno == errno.EACCES:
        return InputError(
            "Port {port} needs root: set a `port` of at least 1024 in {origin}.",
            code="service.port-not-allowed",
            port=port,
            origin=origin,
        )
    return InputError(
        "{host!r} is not an address of this machine ({reason}): set `host` in {origin} to "
        "127.0.0.1, 0.0.0.0 or one of the machine's own addresses.",
        code="service.unknown-host",
        host=host,
        reason=error.strerror,
        origin=origin,
    )
