"""Logs the rounds of a simulation to TensorBoard or MLflow, with the keys of `history.jsonl`.

A simulation that continues also logs the earlier rounds, so that no round is missing.
"""

import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from device_agent.cli.missing_packages import missing_package
from device_agent.formats.atomic_files import write_file
from device_agent.formats.protocol.fleet import Measured
from profiles.errors import InputError
from toolkit.simulation.results import EVENTS, RUN_ID, RoundResult, RunFolder

LogName: TypeAlias = Literal["mlflow", "tensorboard"]
"""A service to which rounds are logged. It has the name of its package."""
Observer = Callable[[RoundResult], None]
"""Called with each finished round."""
EXPERIMENT = "edgetailor"
ERRORS = ("rmse", "mae")
"""Figures of a regression that are logged."""
DEVICE_FIGURES = ("accuracy", "loss", "mean_accuracy", "worst_accuracy", "trained_accuracy")
"""Figures of a federated evaluation that are logged, with `devices_` before their names."""


def check_installed(names: Iterable[LogName]) -> None:
    """Raise InputError if the package of a log is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise missing_package(name)


@contextmanager
def open_logs(
    names: Iterable[LogName], folder: RunFolder, settings: Mapping[str, object]
) -> Iterator[list[Observer]]:
    """Provide a function for each log in `names`, which logs the result of a round.

    The rounds that are already finished in `folder` are logged first.

    Raises InputError if MLflow's store cannot be used.
    """
    with ExitStack() as stack:
        logs: list[Observer] = []
        for name in dict.fromkeys(names):
            if name == "tensorboard":
                log = stack.enter_context(_tensorboard(folder))
            else:
                log = stack.enter_context(_mlflow(folder, settings))
            for result in folder.history:
                log(result)
            logs.append(log)
        yield logs


def metrics(result: RoundResult) -> dict[str, float]:
    """The figures of a round, by key. Figures that are None are left out."""
    figures = msgspec.structs.asdict(result)
    del figures["round"], figures["devices"], figures["held_out"]
    figures["hostile"] = None if result.hostile is None else len(result.hostile)
    figures["left_out"] = None if result.left_out is None else len(result.left_out)
    figures["limited"] = None if result.limited is None else len(result.limited)
    if result.held_out is not None:
        figures |= {key: getattr(result.held_out, key) for key in ERRORS}
        figures |= _own(result.held_out, "metric_")
    if result.devices is not None:
        figures |= {f"devices_{key}": getattr(result.devices, key) for key in DEVICE_FIGURES}
        figures |= _own(result.devices, "devices_metric_")
    return {key: float(value) for key, value in figures.items() if value is not None}


def _own(figures: Measured, prefix: str) -> dict[str, float]:
    """The metrics of a loss, named with `prefix`, so that the user's names replace no figure."""
    return {f"{prefix}{name}": value for name, value in (figures.metrics or {}).items()}


@contextmanager
def _tensorboard(folder: RunFolder) -> Iterator[Observer]:
    """Provide a function that writes a round to event files."""
    from torch.utils.tensorboard import SummaryWriter

    # From `purge_step` on, readers ignore the steps in earlier files.
    again = 1 if folder.history else None
    with SummaryWriter(str(folder.root / EVENTS), purge_step=again) as writer:

        def log(result: RoundResult) -> None:
            for key, value in metrics(result).items():
                writer.add_scalar(key, value, result.round)
            writer.flush()

        yield log


@contextmanager
def _mlflow(folder: RunFolder, settings: Mapping[str, object]) -> Iterator[Observer]:
    """Provide a function that logs to the run whose id is in the folder, or to a new run."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric
    from mlflow.exceptions import MlflowException

    @contextmanager
    def explained() -> Iterator[None]:
        try:
            yield
        except MlflowException as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            raise InputError(
                "MLflow cannot be used: {reason}. Check MLFLOW_TRACKING_URI, then run the same "
                "command again to continue. Or run it without the log.",
                code="simulation.mlflow",
                reason=reason,
            ) from None

    file = folder.root / RUN_ID
    with explained():
        client = MlflowClient()
        if not file.exists():
            write_file(file, _new_run(client, folder.root, settings).encode())
        run = file.read_text()
        client.update_run(run, status="RUNNING")
        keys = dict.fromkeys(key for result in folder.history for key in metrics(result))
        known = {
            (key, metric.step) for key in keys for metric in client.get_metric_history(run, key)
        }

    def log(result: RoundResult) -> None:
        now, step = int(time.time() * 1000), result.round
        new = [
            Metric(key, value, now, step)
            for key, value in metrics(result).items()
            if (key, step) not in known
        ]
        with explained():
            client.log_batch(run, metrics=new)

    try:
        yield log
    except BaseException:
        with suppress(MlflowException):
            client.set_terminated(run, "FAILED")
        raise
    with explained():
        client.set_terminated(run)


def _new_run(client: Any, root: Path, settings: Mapping[str, object]) -> str:
    """Create a run with the settings as its parameters, and return its id."""
    from mlflow.entities import Param

    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
    known = client.get_experiment_by_name(name)
    experiment = known.experiment_id if known else client.create_experiment(name)
    run: str = client.create_run(experiment, run_name=root.resolve().name).info.run_id
    tables = {
        key: value if isinstance(value, dict) else {"": value} for key, value in settings.items()
    }
    texts = {
        f"{key}.{inner}".rstrip("."): setting if isinstance(setting, str) else json.dumps(setting)
        for key, table in tables.items()
        for inner, setting in table.items()
    }
    client.log_batch(run, params=[Param(key, text) for key, text in texts.items()])
    return run
