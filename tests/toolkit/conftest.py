"""What several of the toolkit's test files start from."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from command_models import NETS
from shared_recordings import shared_recordings, structure
from toolkit.aggregation import federation
from toolkit.splitting import split
from toolkit.submodels.hyperparameters import TrainingConfig
from toolkit.submodels.submodel import Submodel
from vector_fleet import Fleet, configured, enrol, running

SPLIT: dict[tuple[object, ...], Submodel] = {}
"""The submodels of all federations in this process."""


def split_once(
    model: nn.Module, spec: str, input_shape: tuple[int, ...], training: TrainingConfig
) -> Submodel:
    """Split a sequence of layers, once for all models of the same structure."""
    if type(model) is not nn.Sequential:
        return split(model, spec, input_shape, training)
    key = (structure(model), spec, input_shape, repr(training))
    if key not in SPLIT:
        SPLIT[key] = split(model, spec, input_shape, training)
    return SPLIT[key]


@pytest.fixture(autouse=True, scope="module")
def shared_submodels() -> Iterator[None]:
    """Federations of the same model share its submodels, and all splits its recording.

    They take most of small rounds.
    """
    with shared_recordings() as patched:
        patched.setattr(federation, "split", split_once)
        yield


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
