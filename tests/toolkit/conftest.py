"""What several of the toolkit's test files start from."""

from pathlib import Path

import pytest

from command_models import NETS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The current folder of the commands, with somebody's models in it."""
    (tmp_path / "nets.py").write_text(NETS)
    return tmp_path
