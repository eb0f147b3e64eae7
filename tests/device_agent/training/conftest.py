"""What tests of the choice of a runtime share."""

from pathlib import Path

import pytest

from bundles import BundleOf
from device_agent.formats.bundle import Bundle, open_bundle


@pytest.fixture
def full(bundle_of: BundleOf) -> Bundle:
    return open_bundle(bundle_of("full"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state" / "runtimes.json"
