"""Real bundles of every family for the device's tests; they read them, and copy what they alter."""

from pathlib import Path

import pytest

from bundles import FAMILIES, BundleOf, tiny_bundle, write_data
from commands import Agent, run_forked
from shared_recordings import models_recorded_once

__all__ = ["models_recorded_once"]


@pytest.fixture(scope="session")
def bundle_of(tmp_path_factory: pytest.TempPathFactory) -> BundleOf:
    """The bundle of a family by name, exported when it is first asked for."""
    return lambda family: tiny_bundle(tmp_path_factory, family)


@pytest.fixture(params=FAMILIES)
def bundle(request: pytest.FixtureRequest, bundle_of: BundleOf) -> Path:
    """The bundle of every family in turn."""
    return bundle_of(request.param)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of 21 samples for those bundles."""
    return str(write_data(tmp_path_factory.mktemp("data") / "local.npz"))


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    """Runs `edgetailor-agent` in the temporary folder.

    Its process starts with libraries that a device does not have; see `test_torch_free.py`.
    """
    return lambda *arguments: run_forked("edgetailor-agent", *arguments, cwd=tmp_path)
