"""`edgetailor serve`: a coordinator bound to its socket, with its tokens and its worker."""

import json
import logging
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import uvicorn
from fastapi import FastAPI

from device_agent.client.addresses import check_secret
from device_agent.formats.atomic_files import shown, write_file
from profiles.errors import InputError
from toolkit.coordinator.coordinator import Chooser, Coordinator, restore
from toolkit.coordinator.federation_config import CoordinatorConfig, load_config
from toolkit.coordinator.http.connection_limits import Connection, allow_many
from toolkit.coordinator.http.http_api import create_app
from toolkit.coordinator.http.request_limits import RequestLimits
from toolkit.coordinator.http.server_socket import GRACE_S, bind, preparing, url_of
from toolkit.coordinator.round_worker import Model, RoundWorker, read_held_out
from toolkit.coordinator.storage.coordinator_store import Store

if TYPE_CHECKING:
    from toolkit.aggregation.federation import Federation

logger = logging.getLogger(__name__)

OPERATOR = "operator.token"
ADDRESS = "address"
KEEP_ALIVE_S = 75
"""Idle connections live longer than agents wait between two questions, so that none is cut off
just as it is used again."""


def token_file(state: Path, kind: str) -> Path:
    """The join token of a kind of device, in the state folder."""
    return state / "tokens" / f"{kind}.token"


def serve(config_path: Path) -> None:
    """Serve the federation of the file `config_path` until interrupted (KeyboardInterrupt).

    Raises InputError for a mistake in the file, a
    port in use or a state folder of another federation, and whatever ended the rounds early.
    """
    from toolkit.coordinator.devices.submodel_assignment import (
        planner,
    )  # torch and exporters come with it

    config = load_config(config_path)
    # uvicorn raises the signal again once it has stopped: an orderly end, not the default one.
    signal.signal(signal.SIGTERM, _end)
    allow_many()
    with bind(config.host, config.port, config_path) as listening:
        with preparing(listening):
            model = federation(config)
            server = Server(config, model, config_path, listening=listening)
            if any(kind.planned for kind in config.devices):
                logger.info("Preparing: devices that ask at %s are told to wait.", server.url)
            server.coordinator.chooser = planner(config, model)
        for line in server.greeting():
            logger.info(line)
        server.run()


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


class Server:
    """A coordinator that is bound to its socket and has its tokens on disk, ready to `run`.

    `origin` is the configuration file that error messages name; `chooser` plans for the kinds that
    need it; `listening` is its socket, by default one that it makes. Raises InputError where the
    port or the state folder cannot be used.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        model: Model,
        origin: Path,
        chooser: Chooser | None = None,
        listening: socket.socket | None = None,
    ) -> None:
        self.config = config
        held_out = read_held_out(config.held_out, config.input_shape, config.training.labels)
        self._socket = listening or bind(config.host, config.port, origin)
        try:
            self._store = Store(config.state)
            self.coordinator = _coordinator(config, self._store, chooser)
        except BaseException:
            self._socket.close()
            raise
        self.url = url_of(self._socket, config.host)
        write_file(config.state / ADDRESS, f"{self.url}\n".encode())
        self._conductor = RoundWorker(self.coordinator, model, held_out, self.stop)
        settings = uvicorn.Config(
            RequestLimits(create_app(self.coordinator, self._lifespan)),
            http=Connection,
            log_level="critical",  # RequestLimits logs what is worth knowing
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
        self._uvicorn = uvicorn.Server(settings)

    def greeting(self) -> list[str]:
        """What to tell whoever started this."""
        state = shown(self.config.state)
        devices = [
            f"  {kind.count} x {kind.name} ({kind.submodel}): {token_file(state, kind.name)}"
            for kind in self.config.devices
        ]
        return [
            f"Coordinator at {self.url}",
            "Its routes are explained at /docs, without the internet at /openapi.json.",
            f"Join: edgetailor-agent join {self.url} --token-file FILE",
            *devices,
            f"The operator's token, for /v1/status: {state / OPERATOR}",
        ]

    def run(self) -> None:
        """Serve until interrupted or `stop`ped. Raises what ended the rounds, if anything did."""
        try:
            self._uvicorn.run(sockets=[self._socket])
        finally:
            self._socket.close()
            self._store.close()
        if self._conductor.failure is not None:
            raise self._conductor.failure

    def stop(self) -> None:
        """Let `run` return, from any thread."""
        self._uvicorn.should_exit = True

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self._conductor.start()
        yield
        self._conductor.stop()


def federation(config: CoordinatorConfig) -> "Federation":
    """The global model that `config` describes, split for every kind of device.

    Raises ModelError, SpecError or InputError.
    """
    from toolkit.aggregation.federation import Federation

    model = Federation(
        config.model,
        config.input_shape,
        config.training,
        config.weights,
        config.seed,
        config.aggregation,
    )
    for kind in config.devices:
        if not kind.planned:
            model.submodel(kind.submodel)
        if kind.fallback is not None:
            model.submodel(kind.fallback)
    return model


def _coordinator(config: CoordinatorConfig, store: Store, chooser: Chooser | None) -> Coordinator:
    _check_same_federation(config, store)
    for kind in config.devices:
        token = _token(token_file(config.state, kind.name))
        store.registry.set_token(kind.name, token, kind.count, config.token_days)
    coordinator = restore(config, store, time.monotonic, chooser)
    coordinator.operator_token = _token(config.state / OPERATOR)
    return coordinator


def _check_same_federation(config: CoordinatorConfig, store: Store) -> None:
    """Raise InputError where the state folder was begun with another fleet or model."""
    now = {
        "model": config.model,
        "input_shape": list(config.input_shape),
        "seed": config.seed,
        "training": asdict(config.training),
        "devices": [
            kind.model_dump(exclude={"fallback"}, exclude_none=True) for kind in config.devices
        ],
    }
    before = json.loads(store.settle("federation", json.dumps(now)))
    changed = [key for key in now if now[key] != before[key]]
    if changed:
        raise InputError(
            f"{config.state} holds a federation with another `{changed[0]}`: set it back to "
            f"{json.dumps(before[changed[0]])}, or set another `state` folder."
        )


def _token(path: Path) -> str:
    """The token in the file `path`, made where there is none; only the owner may read it."""
    if not path.exists():
        write_file(path, f"{secrets.token_urlsafe(32)}\n".encode(), mode=0o600)
    try:
        return check_secret(path.read_text().strip())
    except (UnicodeDecodeError, InputError):
        raise InputError(
            f"{path} holds no token, which is one word of plain characters: remove the file, and a "
            "new one is made."
        ) from None
