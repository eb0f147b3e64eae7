"""Starts `edgetailor serve`: first the port and the state folder, then the slow imports.

This module imports neither torch nor FastAPI, so that a port in use or a damaged state folder is
refused immediately.
"""

import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from device_agent.formats.atomic_files import shown
from toolkit.coordinator.federation_file.federation_config import CoordinatorConfig
from toolkit.coordinator.federation_file.load_config import load_config
from toolkit.coordinator.federation_secrets import read_secrets
from toolkit.coordinator.http.certificates import certificate_of
from toolkit.coordinator.http.connection_limits import raise_descriptor_limit
from toolkit.coordinator.http.server_socket import answer_preparing, bind
from toolkit.coordinator.settings_check import check_judged
from toolkit.coordinator.startup_message import startup_message
from toolkit.coordinator.storage.coordinator_store import Store
from toolkit.coordinator.storage.folder_check import DATABASE
from toolkit.coordinator.storage.folder_lock import claimed
from toolkit.coordinator.storage.release_folder import Release
from toolkit.metric_logs import LogName, check_installed
from toolkit.web.built_page import read_page

logger = logging.getLogger(__name__)


MakeRelease = Callable[[CoordinatorConfig, int], Release]
"""(the federation, the number of a round) -> the release of this round's model."""


def serve(
    config_path: Path,
    read_all: bool = False,
    new_key: bool = False,
    make_release: MakeRelease | None = None,
    logs: Sequence[LogName] = (),
) -> None:
    """Serve the federation of the file `config_path` until interrupted.

    Args:
        config_path: The federation's TOML file.
        read_all: Verify the hash of every kept model.
        new_key: Make a new key, because the coordinator's key is lost.
        make_release: Makes the releases that the table [release] asks for.
        logs: Log each round to `"mlflow"`, `"tensorboard"` or both.

    Raises:
        InputError: For a mistake in the file, a port in use, a state folder of another federation,
            or a log that cannot be used.
        EdgeTailorError: If the rounds cannot continue, for example because the model diverged.
        KeyboardInterrupt: When interrupted.
    """
    check_installed(logs)
    config = load_config(config_path)
    check_judged(config)
    # uvicorn raises the signal again after it has stopped. This handler ends the process cleanly.
    signal.signal(signal.SIGTERM, _exit)
    raise_descriptor_limit()
    page = read_page()
    certificate = certificate_of(config)
    with bind(config.host, config.port, config_path) as listening:
        joining = page if config.phones else None
        with claimed(config.state) as lock, answer_preparing(listening, certificate, joining):
            port, folder = listening.getsockname()[1], shown(config.state)
            logger.info("Starting at port %d with the state folder %s.", port, folder)
            store = None
            # A new folder stays empty until the model is loaded.
            if (config.state / DATABASE).exists():
                store = Store(config.state, config.kept_models, read_all=read_all, lock=lock)
                read_secrets(config, store, new_key)  # raises InputError if a file is damaged
            logger.info("Loading PyTorch.")
            with _uninterrupted():
                from toolkit.coordinator.devices.submodel_assignment import make_planner
                from toolkit.coordinator.federation_setup import federation
                from toolkit.coordinator.flower_site import SITE, SiteModel
                from toolkit.coordinator.server import Server

            model = federation(config, _log_stage)
            site = SiteModel(model, config.state / SITE) if config.site else None
            server = Server(
                config,
                site or model,
                config_path,
                page=page,
                listening=listening,
                store=store,
                lock=lock,
                certificate=certificate,
                ready=site.ready if site else lambda: True,
                new_key=new_key,
                loss_code=model.loss_code(),
                logs=logs,
            )
        if make_release is not None:
            coordinator = server.coordinator
            server.round_worker.make_release = lambda r: make_release(coordinator.config, r)
        if site is None:
            server.coordinator.make_model = federation
        planned = [kind.name for kind in config.devices if kind.planned]
        if planned:
            server.make_planner = lambda *args: make_planner(config, *args)
        pin = certificate.fingerprint if certificate else None
        for line in startup_message(config, server.url, config_path, page is not None, pin):
            logger.info(line)
        server.run()


def _log_stage(stage: str) -> None:
    logger.info("%s.", stage[:1].upper() + stage[1:])


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay signals to the end of the block: torch aborts if a signal interrupts its import."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    received: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        logger.info("Stopping as soon as PyTorch is loaded.")

    for signum in before:
        signal.signal(signum, note)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        if received:
            signal.raise_signal(received[0])


def _exit(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)
