"""What several of the toolkit's test files start from."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from command_models import NETS
from vector_fleet import Fleet, configured, enrol, running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The current folder of the commands, with somebody's models in it."""
    (tmp_path / "nets.py").write_text(NETS)
    return tmp_path


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A federation in round 1, shared by tests of refusals, which change nothing."""
    folder = tmp_path_factory.mktemp("fleet")
    with running(configured(folder)) as server:
        yield server, enrol(server, folder)
