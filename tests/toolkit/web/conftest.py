"""A real browser and a real coordinator. `make test-web` builds the page and finds the browser."""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from toolkit.coordinator.federation_config import load_config
from toolkit.coordinator.federation_setup import federation
from toolkit.coordinator.server import Server
from toolkit.web.built_page import Page, read_page


@pytest.fixture(scope="session")
def chromium():
    """Chromium without a window."""
    from playwright.sync_api import sync_playwright

    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def browser(chromium):
    """Chromium, whose pages end with the test: one that polls on would disturb the next test."""
    yield chromium
    for context in list(chromium.contexts):
        for page in context.pages:
            page.unroute_all(behavior="ignoreErrors")
        context.unroute_all(behavior="ignoreErrors")
        context.close()


@contextmanager
def serving(toml: str, folder: Path, page: Page | None = None) -> Iterator[Server]:
    """A coordinator of the real model that `toml` describes, by default with the page as built."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fleet.toml").write_text(toml)
    config = load_config(folder / "fleet.toml")
    server = Server(config, federation(config), folder / "fleet.toml", page=page or read_page())
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()


@pytest.fixture
def serve():
    return serving
