"""Logs the figures of rounds to TensorBoard or MLflow, for `simulate` and `serve`.

A run that continues an earlier run also logs the earlier rounds, so that no round is missing. Each
figure of a round is logged once.
"""

import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from device_agent.cli.missing_packages import missing_package
from device_agent.formats.atomic_files import write_file
from device_agent.formats.protocol.fleet import FederatedEvaluation, HeldOutFigures, Measured
from profiles.errors import InputError

LogName: TypeAlias = Literal["mlflow", "tensorboard"]
"""The name of a service to which rounds are logged. This is the name of its Python package."""
EVENTS, RUN_ID = "tensorboard", "mlflow-run"
"""The folder of TensorBoard's event files, and the file with the id of MLflow's run."""
EXPERIMENT = "edgetailor"
ERRORS = ("rmse", "mae")
"""Figures of a regression that are logged."""
DEVICE_FIGURES = ("accuracy", "loss", "mean_accuracy", "worst_accuracy", "trained_accuracy")
"""Figures of a federated evaluation that are logged, with `devices_` before their names."""


class Logged(NamedTuple):
    """The figures of a round, by key."""

    round: int
    figures: Mapping[str, float]


Log = Callable[[Logged], None]
"""Logs those figures of a round that are not logged yet. Raises InputError if that fails."""


def check_installed(names: Iterable[LogName]) -> None:
    """Raise InputError if the package of a log is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise missing_package(name)


@contextmanager
def open_logs(
    names: Iterable[LogName],
    folder: Path,
    history: Sequence[Logged],
    settings: Mapping[str, object],
) -> Iterator[list[Log]]:
    """Provide a function for each log in `names`. The function logs the figures of a round.

    The rounds in `history` are logged first. `folder` stores the state that a later start needs to
    continue the logs. The `settings` become the parameters of a new run in MLflow.

    Raises InputError if MLflow's store cannot be used.
    """
    with ExitStack() as stack:
        logs: list[Log] = []
        for name in dict.fromkeys(names):
            if name == "tensorboard":
                log = stack.enter_context(_tensorboard(folder, history))
            else:
                log = stack.enter_context(_mlflow(folder, history, settings))
            for logged in history:
                log(logged)
            logs.append(log)
        yield logs


def quality_figures(
    held_out: HeldOutFigures | None, devices: FederatedEvaluation | None
) -> dict[str, float | None]:
    """The figures of a model on held-out samples and on devices, by key."""
    figures: dict[str, float | None] = {}
    if held_out is not None:
        figures |= {key: getattr(held_out, key) for key in ERRORS}
        figures |= _own(held_out, "metric_")
    if devices is not None:
        figures |= {f"devices_{key}": getattr(devices, key) for key in DEVICE_FIGURES}
        figures |= _own(devices, "devices_metric_")
    return figures


def _own(figures: Measured, prefix: str) -> dict[str, float]:
    """The metrics of a loss, named with `prefix`, so that the user's names replace no figure."""
    return {f"{prefix}{name}": value for name, value in (figures.metrics or {}).items()}


def _only_new(
    write: Callable[[int, Mapping[str, float]], None], known: set[tuple[str, int]]
) -> Log:
    """Pass the figures of a round that are not yet `known` to `write`, and add them to `known`."""

    def log(logged: Logged) -> None:
        step = logged.round
        new = {key: value for key, value in logged.figures.items() if (key, step) not in known}
        if new:
            write(step, new)
            known.update((key, step) for key in new)

    return log


@contextmanager
def _tensorboard(folder: Path, history: Sequence[Logged]) -> Iterator[Log]:
    """Provide a function that writes a round to event files."""
    from torch.utils.tensorboard import SummaryWriter

    # From `purge_step` on, readers ignore the steps in earlier files.
    again = min((logged.round for logged in history), default=None)
    with SummaryWriter(str(folder / EVENTS), purge_step=again) as writer:

        def write(step: int, figures: Mapping[str, float]) -> None:
            for key, value in figures.items():
                writer.add_scalar(key, value, step)
            writer.flush()

        yield _only_new(write, set())


@contextmanager
def _mlflow(
    folder: Path, history: Sequence[Logged], settings: Mapping[str, object]
) -> Iterator[Log]:
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
                "command again to continue. Or run it without `--log mlflow`.",
                code="simulation.mlflow",
                reason=reason,
            ) from None

    file = folder / RUN_ID
    with explained():
        client = MlflowClient()
        if not file.exists():
            write_file(file, _new_run(client, folder, settings).encode())
        run = file.read_text()
        client.update_run(run, status="RUNNING")
        keys = dict.fromkeys(key for logged in history for key in logged.figures)
        known = {
            (key, metric.step) for key in keys for metric in client.get_metric_history(run, key)
        }

    def write(step: int, figures: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        with explained():
            new = [Metric(key, value, now, step) for key, value in figures.items()]
            client.log_batch(run, metrics=new)

    try:
        yield _only_new(write, known)
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
