"""The search for workloads in several processes, against the same search in this one."""

import os
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from bundles import SAMPLE_SHAPE
from commands import warm_context
from device_agent.formats.protocol.fleet import Preparation
from refusals import refused
from toolkit.planning import parallel_workloads
from toolkit.planning.parallel_workloads import ModelSource, Search, StoppedError
from toolkit.planning.submodel_workloads import Impossible, Known, Workloads
from toolkit.submodels.hyperparameters import TrainingConfig
from toolkit.submodels.model_loading import load_global

SOURCE = ModelSource("bundles:tiny_cnn", SAMPLE_SHAPE, TrainingConfig(batch_size=4))
SPECS = ("full", "width:0.5", "slice:no-such-layer")
SMALL, LARGE = "width:0.25", "full"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, for the processes too."""
    monkeypatch.setenv("EDGETAILOR_CACHE", str(tmp_path))
    return tmp_path


def prepared(variables: dict[str, str]) -> None:
    torch.set_num_threads(1)
    os.environ.update(variables)


@pytest.fixture
def warm(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes forked from one that has loaded torch; another test starts a fresh one."""
    forked = warm_context()

    def pool(count: int, *_: object) -> ProcessPoolExecutor:
        variables = {"EDGETAILOR_CACHE": str(cache)}
        return ProcessPoolExecutor(count, forked, prepared, (variables,))

    monkeypatch.setattr(parallel_workloads, "ProcessPoolExecutor", pool)


@pytest.mark.usefixtures("warm")
@pytest.mark.long
def test_processes_find_what_one_finds(cache: Path) -> None:
    told: list[Preparation] = []
    search = Search(SOURCE, None, told.append, threading.Event(), SPECS, processes=2)
    known, impossible = search.run()
    assert [str(entry) for entry in told] == [
        f"planning {number} of 3: {spec}" for number, spec in enumerate(SPECS, 1)
    ]
    module, _ = load_global(SOURCE.reference)
    workloads = Workloads(module, SOURCE.sample_shape, SOURCE.training, cache=cache / "here")
    assert known == [workloads.of(spec) for spec in SPECS[:2]]
    assert list(impossible) == [workloads.of(SPECS[2])]
    told.clear()
    assert search.run() == (known, impossible)
    assert told == []  # all was remembered


@pytest.mark.long
@pytest.mark.usefixtures("warm")
def test_what_no_device_may_hold_is_not_exported(cache: Path) -> None:
    module, _ = load_global(SOURCE.reference)
    tensors = {}
    for spec in (SMALL, LARGE):
        entry = Workloads(module, SAMPLE_SHAPE, SOURCE.training).of(spec)
        assert isinstance(entry, Known)
        tensors[spec] = entry.work.state
    for path in cache.glob("*.json"):
        path.unlink()
    # The samples and the largest activation are a few kB.
    between = tensors[LARGE] - 1
    assert tensors[SMALL] < between / 2
    stopping = threading.Event()
    known, impossible = Search(SOURCE, between, print, stopping, (LARGE, SMALL), 1).run()
    assert [entry.submodel for entry in known] == [SMALL]
    (large,) = impossible
    assert isinstance(large, Impossible)
    assert large.submodel == LARGE
    assert large.reason.startswith("it needs at least ")
    for path in cache.glob("*.json"):
        path.unlink()
    # The smallest is known in any case: a refused device is told what it lacks.
    known, impossible = Search(SOURCE, 1, print, stopping, (LARGE, SMALL), 1).run()
    assert [entry.submodel for entry in known] == [SMALL]
    assert [entry.submodel for entry in impossible] == [LARGE]


def test_a_search_can_be_stopped(cache: Path) -> None:
    stopping = threading.Event()
    search = Search(SOURCE, None, lambda _: stopping.set(), stopping, SPECS, processes=1)
    with pytest.raises(StoppedError):
        search.run()


@pytest.mark.usefixtures("warm")
def test_errors_of_the_processes_arrive(cache: Path) -> None:
    source = ModelSource("toolkit.models:nothing", SAMPLE_SHAPE, SOURCE.training)
    with refused("model.unknown-callable", "nothing"):
        Search(source, None, print, threading.Event(), SPECS, processes=1).run()
