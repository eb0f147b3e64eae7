"""The rounds of `serve` in MLflow and TensorBoard, read back by their own readers."""

import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from device_agent.formats.protocol.fleet import HeldOutFigures, RoundResult
from log_messages import logged as messages
from profiles.errors import InputError
from refusals import refused
from toolkit.coordinator.round_logs import RoundLogs, logged
from toolkit.metric_logs import Logged
from toolkit.simulation.results import RoundResult as Simulated
from vector_fleet import assert_soon, configured, enrol, joined, running, send_all

FIRST = RoundResult(round=1, accuracy=0.5, loss=2.0, updates=2, left_out={"board-1": "no"})
BOTH = ("mlflow", "tensorboard")


def test_figures_have_the_names_that_simulate_gives_them() -> None:
    own = HeldOutFigures(rmse=0.5, metrics={"iou": 0.25})
    figures = logged(replace(FIRST, held_out=own, staleness=[1, 0, 3])).figures
    assert figures == {
        "accuracy": 0.5,
        "loss": 2.0,
        "updates": 2.0,
        "left_out": 1.0,
        "limited": 0.0,
        "rmse": 0.5,
        "metric_iou": 0.25,
        "mean_staleness": 1.5,
        "max_staleness": 2.0,
    }
    assert figures.keys() - Simulated.__struct_fields__ == {"updates", "rmse", "metric_iou"}


def test_what_a_log_refuses_is_logged_with_the_next_round_and_no_round_waits() -> None:
    came: list[Logged] = []
    away, tried = [True], threading.Semaphore(0)

    def log(logged: Logged) -> None:
        tried.release()
        if away[0]:
            raise InputError("MLflow is away.", code="simulation.mlflow")
        came.append(logged)

    results = [FIRST]
    with messages("toolkit") as said:
        writer = RoundLogs(lambda: results, [log])
        writer.start()
        writer.wake()
        assert tried.acquire(timeout=20)
        assert came == []
        away[0] = False
        results.append(replace(FIRST, round=2))
        writer.wake()
        writer.stop()
    assert [logged.round for logged in came][-2:] == [1, 2]
    assert said[0] == "MLflow is away. The rounds go on, and the next one tries again."


def of_tensorboard(folder: Path) -> dict[tuple[str, int], float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder / "tensorboard"))
    reader.Reload()
    return {
        (key, point.step): point.value
        for key in reader.Tags()["scalars"]
        for point in reader.Scalars(key)
    }


def of_history(state: Path) -> dict[tuple[str, int], float]:
    """The figures of history.json that are numbers; no update was left out or limited."""
    figures = {}
    for line in json.loads((state / "history.json").read_bytes())["history"]:
        assert not line["left_out"]
        numbers = {key: line[key] for key in ("accuracy", "loss", "updates")}
        numbers |= {"left_out": 0, "limited": 0}
        figures |= {(key, line["round"]): value for key, value in numbers.items()}
    return figures


@contextmanager
def store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/runs.db")
        yield


@pytest.mark.logs
@pytest.mark.parametrize("first", [(), BOTH], ids=["later", "throughout"])
def test_rounds_of_serve_are_logged_also_over_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: tuple[str, ...]
) -> None:
    from mlflow import MlflowClient

    config = configured(tmp_path / "fleet")
    with store(tmp_path, monkeypatch):
        with running(config, logs=first) as server:
            links = enrol(server, tmp_path / "fleet")
            send_all(links, 1, tmp_path / "one")
            assert_soon(lambda: server.coordinator.rounds.done == 1)
        with running(config, logs=BOTH) as server:
            again = (joined(server, tmp_path / "fleet" / str(number)) for number in range(3))
            send_all(dict(zip(links, again, strict=True)), 2, tmp_path / "two")
            assert_soon(lambda: server.coordinator.rounds.done == 2)
        client = MlflowClient()
        experiment = client.get_experiment_by_name("edgetailor")
        (run,) = client.search_runs([experiment.experiment_id])
        curves = {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
    expected = of_history(config.state)
    assert {step for _, step in expected} == {0, 1, 2}
    assert run.info.status == "FINISHED"
    assert run.data.params["training.epochs"] == "1"
    assert not [key for key in run.data.params if key.startswith("notify")]
    assert {(key, p.step): p.value for key, curve in curves.items() for p in curve} == expected
    read = of_tensorboard(config.state)
    assert read.keys() == expected.keys()
    for place, value in read.items():  # event files hold float32
        assert math.isclose(value, expected[place], rel_tol=1e-6), place


@pytest.mark.logs
def test_a_store_that_is_missing_is_refused_before_a_device_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from toolkit.coordinator.server import Server
    from vector_fleet import VectorModel

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    config = configured(tmp_path)
    server = Server(config, VectorModel(), tmp_path / "fleet.toml", logs=["mlflow"])
    with refused("simulation.mlflow"):
        server.run()
    with running(config) as again:  # the folder is free again
        assert again.coordinator.rounds.done == 0
