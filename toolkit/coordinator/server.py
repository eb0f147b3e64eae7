"""A coordinator bound to its socket, with its tokens and its workers."""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI

from device_agent.formats.atomic_files import write_file
from device_agent.formats.input_summary import summary_of
from device_agent.formats.protocol.fleet import Preparation
from toolkit.coordinator.closing.round_models import Model
from toolkit.coordinator.closing.round_worker import RoundWorker
from toolkit.coordinator.coordinator import Coordinator, restore
from toolkit.coordinator.database.settings_log import changes_model
from toolkit.coordinator.devices.planned_submodel import SubmodelPlanner
from toolkit.coordinator.federation_file.federation_config import CoordinatorConfig
from toolkit.coordinator.federation_secrets import keep_secrets, read_secrets
from toolkit.coordinator.federation_setup import own_samples
from toolkit.coordinator.federation_source import FILE
from toolkit.coordinator.http.certificates import RENEWAL_S, Certificate, certificate_of
from toolkit.coordinator.http.connection_limits import connections, most_connections
from toolkit.coordinator.http.http_api import create_app
from toolkit.coordinator.http.open_connections import OpenConnections
from toolkit.coordinator.http.repeated_polls import RepeatedPolls
from toolkit.coordinator.http.request_limits import RequestLimits
from toolkit.coordinator.http.server_socket import bind, url_of, uvicorn_server
from toolkit.coordinator.join_links import ADDRESS
from toolkit.coordinator.notifications import EVENTS, Notifier
from toolkit.coordinator.round_logs import UNLOGGED, round_logs
from toolkit.coordinator.settings_check import (
    check_judged,
    check_same_loss,
    check_same_settings,
    record_changes,
)
from toolkit.coordinator.storage.coordinator_store import Store
from toolkit.coordinator.storage.folder_lock import FolderLock
from toolkit.coordinator.storage.retention import KEEP_UPDATES
from toolkit.metric_logs import LogName
from toolkit.web.built_page import Page

logger = logging.getLogger(__name__)

MakePlanner = Callable[[Callable[[Preparation], None], threading.Event], SubmodelPlanner]
"""(progress, stopping) -> the planner. It calls `progress` with every step and ends early, with
any error, when `stopping` is set."""


class Server:
    """A coordinator that is bound to its socket and has its tokens on disk, ready to `run`.

    Args:
        config: The federation's file.
        model: The global model.
        origin: The path of the file, for error messages.
        planner: Assigns submodels to devices of `auto` kinds.
        page: The built files of the pages for phones and the operator, if there are any.
        listening: The server's socket. By default the socket is created from `config`.
        store: The state folder, if the caller has opened it already.
        lock: The lock of the state folder, if the caller holds it but has not opened the folder.
        certificate: For https. By default the certificate is read from the files that `config`
            names.
        ready: Whether the next round may begin.
        new_key: Make a new key, because the coordinator's key is lost.
        loss_code: A description of the user's own loss; None for built-in losses.
        logs: The services to which `run` logs the rounds.

    Attributes:
        make_planner: Creates the planner while the server runs, if `planner` is not given.
        opened: The open connections.

    Raises:
        InputError: If the port or the state folder cannot be used.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        model: Model,
        origin: Path,
        planner: SubmodelPlanner | None = None,
        page: Page | None = None,
        listening: socket.socket | None = None,
        store: Store | None = None,
        lock: FolderLock | None = None,
        certificate: Certificate | None = None,
        ready: Callable[[], bool] = lambda: True,
        new_key: bool = False,
        loss_code: str | None = None,
        logs: Sequence[LogName] = (),
    ) -> None:
        self.config, self._logs = config, logs
        self.make_planner: MakePlanner | None = None
        self._certificate = certificate or certificate_of(config)
        check_judged(config)
        held_out = None if config.held_out is None else own_samples(config, config.held_out)
        self._socket = listening or bind(config.host, config.port, origin)
        try:
            self._store = store or Store(config.state, config.kept_models, lock=lock)
        except BaseException:
            self._socket.close()
            raise
        try:
            self.coordinator = _coordinator(config, self._store, planner, new_key, loss_code)
            self._store.set_value(KEEP_UPDATES, str(config.keep_updates))
            self._store.set_value(FILE, str(origin.resolve()))
        except BaseException:
            self._store.close()
            self._socket.close()
            raise
        if held_out is not None:
            self.coordinator.inputs = summary_of(held_out[0])
        self.url = url_of(self._socket, config.host, "https" if self._certificate else "http")
        write_file(config.state / ADDRESS, f"{self.url}\n".encode())
        self.round_worker = RoundWorker(self.coordinator, model, held_out, self.stop, ready)
        self._stopping = threading.Event()
        self._planner_failure: Exception | None = None
        self.opened = OpenConnections(self.coordinator.minute_log, most_connections)
        self.coordinator.closed_connections = lambda: self.opened.closed
        told = config.notify
        self.coordinator.notifier = Notifier(
            told.url, told.command, EVENTS if told.events is None else told.events
        )
        polls = RepeatedPolls(self.coordinator)
        self._uvicorn = uvicorn_server(
            RequestLimits(create_app(self.coordinator, self._lifespan, page), self.coordinator),
            connections(self.opened, self._certificate, polls),
        )
        self.coordinator.is_stopping = lambda: self._uvicorn.should_exit

    def run(self) -> None:
        """Serve until an interrupt or `stop`. Raises the error that ended the rounds, if any.

        Raises InputError if a log of the rounds cannot be opened.
        """
        history, settings = self._store.history.results, self.config.model_dump(mode="json")
        shown = {key: value for key, value in settings.items() if key not in UNLOGGED}
        try:
            with round_logs(self._logs, self.config.state, history, shown) as logs:
                self.coordinator.round_published = logs.wake
                self._uvicorn.run(sockets=[self._socket])
        finally:
            self.close()
        failure = self.round_worker.failure or self._planner_failure
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Close the socket and the state folder. `run` calls this at its end."""
        self._socket.close()
        self._store.close()

    def stop(self) -> None:
        """Let `run` return. May be called from any thread."""
        self._uvicorn.should_exit = True

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self.coordinator.notifier.start()
        self.round_worker.start()
        planning = threading.Thread(target=self._plan, name="planner")
        planning.start()
        renewing = asyncio.create_task(self._renew())
        yield
        renewing.cancel()
        self._stopping.set()
        self.round_worker.stop()
        planning.join()
        self.coordinator.notifier.stop()

    async def _renew(self) -> None:
        """Reload the certificate soon after its files were renewed."""
        while self._certificate is not None:
            await asyncio.sleep(RENEWAL_S)
            self._certificate.renew()

    def _plan(self) -> None:
        """Create the planner. Meanwhile rounds run, and devices that need no plan may join."""
        if self.make_planner is None:
            return
        coordinator = self.coordinator

        def progress(preparation: Preparation) -> None:
            coordinator.note_preparation("plan", preparation)

        try:
            planner = self.make_planner(progress, self._stopping)
        except Exception as error:
            if not self._stopping.is_set():
                self._planner_failure = error
                self.stop()
            return
        with coordinator.lock:
            coordinator.planner = planner
            coordinator.note_preparation("plan", None)
        logger.info("The plan is ready: devices of every kind may join.")


def _coordinator(
    config: CoordinatorConfig,
    store: Store,
    planner: SubmodelPlanner | None,
    new_key: bool,
    loss_code: str | None,
) -> Coordinator:
    changes = check_same_settings(config, store)
    if not changes_model(changes):
        check_same_loss(config, store, loss_code)
    secrets = read_secrets(config, store, new_key)
    keep_secrets(config, store, secrets)
    record_changes(config, store, changes, loss_code)
    coordinator = restore(config, store, time.monotonic, planner)
    coordinator.operator_token, coordinator.key = secrets.operator, secrets.key
    return coordinator
