"""Engines with workers against one process: the same bits, and what happens when a worker ends."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models_for_tests import CLASSES, INPUT_SHAPE, smooth_cnn
from parameters import long_one
from refusals import refused
from simulated_runs import Elsewhere, kinds_of, outcome
from toolkit.simulation import chunks, simulate
from toolkit.simulation.chunks import Chunk, shared_out
from toolkit.simulation.engines import ray_actors
from toolkit.simulation.engines.engine import AHEAD, in_order
from toolkit.simulation.results import RunFolder
from toolkit.simulation.rounds import Simulation
from toolkit.simulation.simulation_config import load_simulation
from toolkit.splitting import split
from toolkit.submodels.hyperparameters import TrainingConfig

SPECS = (
    "full",
    "low-rank:0.25,keep=1,decay=0.02",
    "slice:residual",
    "width:0.5",
    "cp:2.0,penalty=2.0,personal-steps=1,factor-steps=1,factor-rate=0.0001",
    "pfedme,penalty=2.0,personal-steps=1",
)
SOME = (SPECS[0], *SPECS[2:5])
LARGE = {SPECS: 10, SOME: 7}
"""Samples with which a training diverges. A client may hold one out instead of training on it, and
some of the two clients of each spec have none."""
EACH, ROUNDS = 3, 2
RAY = pytest.param("ray", marks=pytest.mark.long)


def configured(
    folder: Path,
    seed: int,
    specs: Iterable[str],
    options: str = "",
    large: int = 0,
    each: int = EACH,
) -> Path:
    """The file of a federation with a few clients of each spec, and its samples.

    So many samples are so `large` that the training of a client that has one diverges.
    """
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(200, *INPUT_SHAPE)).astype(np.float32)
    x[draw.choice(200, large, replace=False)] = 1e30
    np.savez(folder / "data.npz", x=x, y=draw.integers(CLASSES, size=200))
    np.savez(folder / "held.npz", x=x[:20].clip(-9, 9), y=draw.integers(CLASSES, size=20))
    (folder / "fleet.toml").write_text(
        f"""
        model = "models_for_tests:smooth_cnn"
        input_shape = {list(INPUT_SHAPE)}
        rounds = {ROUNDS}
        held_out = "held.npz"
        [training]
        batch_size = 8
        learning_rate = 0.01
        [aggregation]
        weights = "softmax"
        [simulation]
        data = "data.npz"
        validation = 0.2
        seed = {seed % 1000}
        {options}
        {kinds_of(specs, each)}"""
    )
    return folder / "fleet.toml"


@pytest.mark.parametrize(
    ("specs", "options"),
    [
        (SOME, ""),
        long_one((SPECS, "")),
        long_one((("width:0.5", SPECS[-1]), 'baseline = "local"')),
        long_one((("width:0.5",), 'baseline = "centralised"')),
    ],
    ids=["some", "together", "local", "centralised"],
)
def test_a_worker_has_the_bits_of_this_process(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, specs: tuple[str], options: str
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_MACS", 1.0)  # a chunk has one client
    file = configured(tmp_path, seed, specs, options, large=LARGE.get(specs, 0), each=2)
    expected = simulate.simulate(file, tmp_path / "here")
    monkeypatch.setattr(simulate, "Processes", lambda setup, workers: Elsewhere(setup))
    came = simulate.simulate(file, tmp_path / "elsewhere", workers=2)
    assert outcome(came, tmp_path / "elsewhere") == outcome(expected, tmp_path / "here")
    if specs in LARGE:
        assert all(entry.diverged and entry.clients for entry in came)


@pytest.mark.parametrize("engine", [long_one("local"), RAY])
def test_workers_that_end_in_a_round(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: simulate.EngineName
) -> None:
    """Killed after the first chunk of the last round, and continued by other workers."""
    file = configured(tmp_path, seed, [SPECS[-1]])
    monkeypatch.setattr(chunks, "CHUNK_MACS", 1.0)
    expected = simulate.simulate(file, tmp_path / "whole")
    keep_personal = RunFolder.keep_personal
    engines: list[Any] = []

    def started(*arguments: Any) -> Any:
        engines.append(start(*arguments))
        return engines[-1]

    def kill() -> None:
        if engine == "ray":
            import ray

            for entry in engines[0]._actors:
                ray.kill(entry)
        for child in multiprocessing.active_children():
            os.kill(child.pid or 0, signal.SIGKILL)
            child.join()

    def keeping(self: RunFolder, client: int, round_: int, tensors: dict[str, np.ndarray]) -> None:
        keep_personal(self, client, round_, tensors)
        if round_ == ROUNDS and len(engines) == 1:
            kill()

    start = simulate.started
    monkeypatch.setattr(simulate, "started", started)
    monkeypatch.setattr(RunFolder, "keep_personal", keeping)
    # Two chunks are ahead, so that one is left when the workers are gone.
    monkeypatch.setattr("toolkit.simulation.engines.engine.AHEAD", 1)
    with refused("simulation.worker-died", "run the same command again", round=ROUNDS):
        simulate.simulate(file, tmp_path / "killed", workers=2, engine=engine)
    came = simulate.simulate(file, tmp_path / "killed", workers=3, engine=engine)
    assert outcome(came, tmp_path / "killed") == outcome(expected, tmp_path / "whole")


@pytest.mark.parametrize("engine", ["local", RAY])
def test_an_error_in_a_worker_is_that_of_this_process(
    seed: int, tmp_path: Path, engine: simulate.EngineName
) -> None:
    file = configured(tmp_path, seed, ["full"])
    simulation: Simulation = simulate.prepare(load_simulation(file), RunFolder(tmp_path / "out"))
    model, client = simulation.federation.save(), simulation.client(0, "full")
    with closing(simulate.started(engine, simulation, 2, 1)) as trains:
        with refused("spec.unknown-cut-point"):
            list(trains.map(1, model, [Chunk("slice:nothing", [client])]))
        (done,) = trains.map(1, model, [Chunk("full", [client])])
        assert done.partial or done.diverged


def test_results_come_in_order_and_few_are_ahead() -> None:
    sent: list[int] = []

    def submit(chunk: Any) -> Future[Any]:
        sent.append(chunk)
        done: Future[Any] = Future()
        done.set_result(chunk)
        return done

    numbers: Callable[[], Iterable[Any]] = lambda: range(50)  # noqa: E731
    for came, result in enumerate(in_order(submit, numbers(), 2)):
        assert result == came
        assert len(sent) <= came + 2 * AHEAD
    assert sent == list(range(50))


def test_chunks_have_every_client_once(seed: int) -> None:
    draw = np.random.default_rng(seed)
    samples = {int(entry): int(draw.integers(2, 99)) for entry in sorted(draw.choice(999, 45))}
    submodel = split(smooth_cnn(), "full", INPUT_SHAPE, TrainingConfig())
    for macs in (1, 10**6, 10**8, 10**12):
        heavy = replace(submodel, counts=replace(submodel.counts, macs=macs))
        found = shared_out(samples, heavy, TrainingConfig())
        assert [client for part in found for client in part] == list(samples)
        sizes = [len(part) for part in found]
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= chunks.MOST_CLIENTS
        assert (max(sizes) == 1) == (macs == 10**12)


def test_ray_has_to_be_installed(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_actors.importlib.util, "find_spec", lambda name: None)
    file = configured(tmp_path, seed, ["full"])
    with refused("program.missing-package", package="ray"):
        simulate.simulate(file, tmp_path / "out", engine="ray")
    with refused("simulation.unknown-engine", engine="rya"):
        simulate.simulate(file, tmp_path / "out", engine="rya")  # type: ignore[arg-type]


@pytest.mark.long
def test_a_cluster_of_two_machines(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.cluster_utils import Cluster

    file = configured(tmp_path, seed, ["full", "width:0.5"])
    expected = simulate.simulate(file, tmp_path / "here")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        with refused("simulation.too-few-processors", found=2, needed=3):
            simulate.simulate(file, tmp_path / "out", workers=3, engine="ray")
        came = simulate.simulate(file, tmp_path / "cluster", workers=2, engine="ray")
    finally:
        cluster.shutdown()
    assert outcome(came, tmp_path / "cluster") == outcome(expected, tmp_path / "here")
