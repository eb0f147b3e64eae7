"""A real browser and a real coordinator. `make test-web` builds the page and finds the browser."""

import os
import shutil

import pytest

from phones import serving


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


@pytest.fixture
def serve():
    return serving
