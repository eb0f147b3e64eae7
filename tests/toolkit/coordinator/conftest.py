"""What several tests of the coordinator start from."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from toolkit.coordinator.server import Server
from vector_fleet import configured, running


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A coordinator without devices."""
    with running(configured(tmp_path / "coordinator")) as started:
        yield started
