"""The server that tests of the client talk to."""

from collections.abc import Iterator

import pytest

from scripted_http import Server


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()
