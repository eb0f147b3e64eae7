"""What several tests of the coordinator start from."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from toolkit.coordinator.server import Server
from vector_fleet import Fleet, configured, enrol, running


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A coordinator without devices."""
    with running(configured(tmp_path / "coordinator")) as started:
        yield started


@pytest.fixture
def new_fleet(tmp_path: Path) -> Iterator[Fleet]:
    """A federation in round 1 with three devices, for one test alone."""
    folder = tmp_path / "fleet"
    with running(configured(folder)) as server:
        yield server, enrol(server, folder)
