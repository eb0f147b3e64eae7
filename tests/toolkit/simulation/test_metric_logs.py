"""Logs of rounds, read back by TensorBoard's and MLflow's own readers; and rounds on a terminal."""

import importlib.util
import io
import json
import math
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from bundles import write_noise
from commands import edgetailor, refusal
from device_agent.formats.protocol.fleet import HeldOutFigures
from log_messages import logged
from models_for_tests import CLASSES, INPUT_SHAPE
from refusals import refused
from toolkit.cli.printed.simulated_rounds import shown_rounds
from toolkit.simulation.logged_figures import logged as logged_figures
from toolkit.simulation.results import RoundResult
from toolkit.simulation.simulate import simulate

KEYS = set(RoundResult.__struct_fields__) - {"round", "held_out", "devices"}


@pytest.fixture
def file(seed: int, tmp_path: Path) -> Path:
    write_noise(tmp_path / "data.npz", 60, seed, INPUT_SHAPE, CLASSES)
    (tmp_path / "fleet.toml").write_text(f"""
        model = "models_for_tests:relu_cnn"
        input_shape = {list(INPUT_SHAPE)}
        rounds = 4
        [simulation]
        data = "data.npz"
        [[devices]]
        name = "one"
        submodel = "full"
        count = 2
    """)
    return tmp_path / "fleet.toml"


class KilledError(BaseException):
    """Nothing of the project catches it, as nothing catches a SIGKILL."""


def kill_after(round_: int, result: RoundResult) -> None:
    if result.round == round_:
        raise KilledError


def of_history(folder: Path) -> dict[str, dict[int, float]]:
    """The values of each key by round, from the file; without keys that are null.

    Of an object by client, the value is the number of clients.
    """
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    values = [
        {key: len(value) if isinstance(value, dict) else value for key, value in line.items()}
        for line in lines
    ]
    curves = {
        key: {line["round"]: line[key] for line in values if line[key] is not None} for key in KEYS
    }
    return {key: values for key, values in curves.items() if values}


def of_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder / "tensorboard"))
    reader.Reload()
    return {
        key: [(point.step, point.value) for point in reader.Scalars(key)]
        for key in reader.Tags()["scalars"]
    }


def check_tensorboard(folder: Path) -> None:
    came, expected = of_tensorboard(folder), of_history(folder)
    assert came.keys() == expected.keys()
    for key, values in came.items():
        assert [step for step, _ in values] == [1, 2, 3, 4]
        for step, value in values:  # event files hold float32
            assert math.isclose(value, expected[key][step], rel_tol=1e-6), (key, step)


@pytest.mark.logs
@pytest.mark.parametrize("first", [(), ("mlflow", "tensorboard")], ids=["later", "throughout"])
def test_a_killed_simulation_continues_its_logs(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: tuple[str, ...]
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/runs.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "ours")
    out = tmp_path / "out"
    with pytest.raises(KilledError):
        simulate(file, out, logs=first, on_round=lambda result: kill_after(2, result))
    simulate(file, out, logs=["tensorboard", "mlflow"])
    check_tensorboard(out)
    client = MlflowClient()
    experiment = client.get_experiment_by_name("ours")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("out", "FINISHED")
    assert run.data.params["model"] == "models_for_tests:relu_cnn"
    assert run.data.params["training.batch_size"] == "32"
    expected = of_history(out)
    assert run.data.metrics.keys() == expected.keys()
    for key, values in expected.items():
        came = [
            (point.step, point.value) for point in client.get_metric_history(run.info.run_id, key)
        ]
        assert came == list(values.items())


@pytest.mark.logs
def test_a_run_that_fails_and_a_store_that_is_missing(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/runs.db")
    with pytest.raises(KilledError):
        simulate(
            *(file, tmp_path / "out"),
            logs=["mlflow"],
            on_round=lambda result: kill_after(1, result),
        )
    client = MlflowClient()
    experiment = client.get_experiment_by_name("edgetailor")
    assert [point.info.status for point in client.search_runs([experiment.experiment_id])] == [
        "FAILED"
    ]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/others.db")
    with refused("simulation.mlflow"):
        simulate(file, tmp_path / "out", logs=["mlflow"])


@pytest.mark.logs
def test_the_option(file: Path, tmp_path: Path) -> None:
    edgetailor("simulate", file, "--log", "tensorboard", cwd=tmp_path).succeeded()
    check_tensorboard(tmp_path / "fleet")


def test_a_missing_package(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def all_but_mlflow(name: str, *more: str) -> object:
        return None if name == "mlflow" else found(name, *more)

    monkeypatch.setattr("importlib.util.find_spec", all_but_mlflow)
    with refused("program.missing-package", package="mlflow", extra="mlflow") as error:
        simulate(file, tmp_path / "out", logs=["mlflow"])
    assert "pip install '.[mlflow]'" in str(error.value)
    assert not (tmp_path / "out").exists()
    said = refusal(edgetailor("simulate", file, "--log", "tensorbord", cwd=tmp_path))
    assert "tensorboard" in str(said)


def result(round_: int, accuracy: float | None) -> RoundResult:
    return RoundResult(
        round=round_,
        accuracy=accuracy,
        loss=0.5,
        clients=3,
        diverged=0,
        bytes_down=0,
        bytes_up=0,
        seconds=2.0,
    )


def test_rounds_on_a_terminal() -> None:
    """A simulation of twenty rounds that continues after the tenth."""
    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=True, width=100, _environ={})
    with shown_rounds(console, 20) as show:
        show(result(11, 0.25))
        show(result(12, 0.375))
    last = drawn.getvalue().rsplit("Round ", 1)[1]
    assert last.startswith("12 of 20")
    for words in ("accuracy 37.5%, loss 0.5000", "elapsed", "remaining"):
        assert words in last


def test_rounds_without_a_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=False)
    with logged("toolkit") as messages, shown_rounds(console, 20) as show:
        show(result(1, None))
    assert messages == ["Round 1 of 20: loss 0.5000, 3 clients, 2.00 s"]


def test_metrics_of_a_loss_are_logged_and_replace_no_figure() -> None:
    own = HeldOutFigures(metrics={"iou": 0.25, "loss": 9.0})
    figures = logged_figures(msgspec.structs.replace(result(1, None), held_out=own)).figures
    assert figures["loss"] == 0.5
    assert {key: value for key, value in figures.items() if "metric" in key} == {
        "metric_iou": 0.25,
        "metric_loss": 9.0,
    }
