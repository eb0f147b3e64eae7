"""Runs a whole simulation: the public function `edgetailor.simulate`."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch

from device_agent.data.data_source import Data
from device_agent.data.local_data import LocalData, load_data
from device_agent.formats.atomic_files import write_file
from exporters.programs.program import Program
from profiles.errors import InputError
from profiles.progress import Report, silent
from profiles.text_formatting import counted
from toolkit.aggregation.federation import Federation
from toolkit.coordinator.federation_file.simulation_table import ALPHA, SHARDS, SimulationTable
from toolkit.coordinator.federation_setup import federation, own_samples
from toolkit.metric_logs import LogName, check_installed, open_logs
from toolkit.simulation.attacks.attack_table import check_attack
from toolkit.simulation.attendance import attendance_of, workloads
from toolkit.simulation.chunks import ChunkTrainer
from toolkit.simulation.client_selection import Choices
from toolkit.simulation.curves import draw_curves
from toolkit.simulation.datasets import read_dataset
from toolkit.simulation.engines.engine import Engine, WorkerSetup
from toolkit.simulation.engines.in_process import InProcess
from toolkit.simulation.engines.processes import Processes
from toolkit.simulation.engines.ray_actors import RayActors
from toolkit.simulation.logged_figures import Observer, logged, observer
from toolkit.simulation.partition import (
    Parts,
    dirichlet_split,
    iid_split,
    shard_split,
    writer_split,
)
from toolkit.simulation.results import (
    BEST,
    CURVES,
    LOSS_CODE,
    MODEL,
    RoundResult,
    RunFolder,
)
from toolkit.simulation.rounds import Simulation
from toolkit.simulation.simulation_config import SimulationConfig, load_simulation
from toolkit.simulation.timetable import timetable_of
from toolkit.simulation.torch_executor import check_device
from toolkit.toml_files import Values

CENTRALISED = "full"
"""The submodel of the only client of `baseline = "centralised"`."""

EngineName: TypeAlias = Literal["local", "ray"]
"""The engine that trains: processes of this machine, or Ray actors."""


def simulate(
    file: str | Path,
    out: str | Path,
    *,
    workers: int = 1,
    engine: EngineName = "local",
    threads: int = 1,
    device: str = "cpu",
    seed: int | None = None,
    rounds: int | None = None,
    values: Values | None = None,
    force: bool = False,
    logs: Sequence[LogName] = (),
    on_round: Observer | None = None,
    progress: Report = silent,
) -> list[RoundResult]:
    """Simulate the federation of a file on this machine, without devices.

    Use it to compare submodels, settings and numbers of clients before devices exist.

    Each client trains exactly what an agent would train. If the simulation is killed, the same call
    continues after the last finished round. With the same number of threads, the result is the
    same, bit for bit, as without the interruption. The result does not depend on `workers` or
    `engine`.

    If `workers` is above 1, a script needs `if __name__ == "__main__":` around this call, because
    the workers import the script.

    Args:
        file: The federation's TOML file, with a table `[simulation]`.
        out: Folder for the results: `history.jsonl`, `curves.png`, `config.json`,
            `global.safetensors`, and `best.safetensors` with the model of the best round.
        workers: Number of processes that train the clients of a round. With 1 and the engine
            `local`, this process trains them.
        engine: `local` starts the workers on this machine; `ray` starts them as Ray actors.
        threads: Threads of PyTorch in each worker. Small models are fastest with one thread.
        device: The PyTorch device on which clients are trained, such as `"cuda"`.
        seed: Replaces both seeds of the file.
        rounds: Replaces the number of rounds in the file.
        values: Values that replace values of the file, for example
            `{"training.epochs": 5, "devices.phone.submodel": "full"}`.
        force: Replace an earlier simulation in `out`.
        logs: Log each round to `"mlflow"`, `"tensorboard"` or both, with the keys of
            `history.jsonl`.
        on_round: Called with the result of each finished round.
        progress: Called before the rounds with the name of each stage when it begins.

    Returns:
        The result of each round, with `accuracy`, `loss`, `clients` and the other keys of
        `history.jsonl`.

    Raises:
        InputError: The file is wrong, `out` has other files, the engine is unknown, its package is
            not installed, or the device or a log cannot be used.
        LimitError: A worker has ended, usually because memory is short.
        DataError: The samples cannot be read or do not fit the model.
        ModelError: The model cannot be loaded or recorded.
        SpecError: A submodel is not possible for the model.
        ExportError: A submodel cannot be traced.
        UpdateError: The training of every client of a round diverged.

    Examples:
        >>> _ = Path("fleet.toml").write_text('''
        ... model = "toolkit.models:digits_cnn"
        ... input_shape = [1, 8, 8]
        ... rounds = 2
        ... [simulation]
        ... data = "toolkit.simulation.digits:digits"
        ... participation = 0.5
        ... [[devices]]
        ... name = "phone"
        ... submodel = "width:0.25"
        ... count = 20
        ... ''')
        >>> [result.clients for result in simulate("fleet.toml", "results")]
        [10, 10]
    """
    check_engine(engine)
    check_installed(logs)
    check_device(device)
    config, folder = load_simulation(Path(file), seed, rounds, values), RunFolder(Path(out))
    settings = config.model_dump(mode="json")
    folder.read(settings, force)
    simulation = prepare(config, folder, progress)
    code = simulation.federation.loss_code()
    if code is not None:
        folder.check_loss(code, force)
        settings[LOSS_CODE] = code
    folder.begin(settings, force)
    with (
        limited_threads(threads),
        open_logs(logs, folder.root, list(map(logged, folder.history)), settings) as opened,
        closing(started(engine, simulation, workers, threads, device)) as trains,
    ):
        progress(f"training {counted(len(simulation.specs), 'client')}")
        simulation.observers = [*map(observer, opened), *([on_round] if on_round else [])]
        simulation.run(trains)
    write_file(folder.root / MODEL, simulation.federation.save())
    best = folder.best_model()
    if best is not None:
        write_file(folder.root / BEST, best)
    draw_curves(folder.history, folder.root / CURVES)
    return folder.history


def check_engine(engine: str) -> None:
    """Raise InputError if there is no such engine."""
    names = get_args(EngineName)
    if engine not in names:
        raise InputError(
            "There is no engine {engine!r}. The engines are {known}: give one of them.",
            code="simulation.unknown-engine",
            engine=engine,
            engines=list(names),
            known=" and ".join(names),
        )


def started(
    engine: EngineName, simulation: Simulation, workers: int, threads: int, device: str = "cpu"
) -> Engine:
    """Start the engine called `engine`.

    With the engine `local` and one worker, this process itself trains the clients.
    """
    setup = WorkerSetup(simulation.config, simulation.held_out, threads, device)
    if engine == "ray":
        return RayActors(setup, workers)
    if workers > 1:
        return Processes(setup, workers)
    return in_process(simulation, device)


def in_process(simulation: Simulation, device: str = "cpu") -> InProcess:
    """The engine that trains in this process, with the model of `simulation`."""
    return InProcess(
        ChunkTrainer(simulation.config, simulation.federation, simulation.held_out, device)
    )


@contextmanager
def limited_threads(threads: int) -> Iterator[None]:
    """Let PyTorch compute with `threads` threads while the block runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def prepare(config: SimulationConfig, folder: RunFolder, progress: Report = silent) -> Simulation:
    """Load model and data, and share the samples among the clients."""
    model = federation(config, progress)
    # These depend on the initial weights, so compute them before the saved model is loaded.
    works = workloads(config, model, progress)
    specs, table = config.specs(), config.simulation
    progress(f"reading the samples of {table.data}")
    program = model.submodel(specs[0]).program
    if table.hostile is not None:
        check_attack(table.hostile.attack, program, model.model.tensors)
    data = read_data(config, program)
    order = np.random.default_rng([table.seed, 0])
    rows = order.permutation(len(data.samples))
    held_out = data.held_out
    if held_out is None:
        count = math.ceil(table.held_out_share * len(rows))
        rows, judges = rows[count:], rows[:count]
        held_out = data.samples.samples(judges), data.samples.labels(judges)
    model.held_out = held_out
    saved = folder.model()
    if saved is not None:
        model.load(saved)
    writers = None if data.writers is None else data.writers[rows]
    shares = partition(table, data.samples.labels(rows), len(specs), order, writers)
    parts = [rows[share] for share in shares]
    choices: Choices = {}
    if table.baseline == "centralised":
        specs, parts = [CENTRALISED], [np.concatenate(parts)]
    elif table.capacities != "fixed":
        refuse_personal_models(model, specs)
        if table.capacities == "up-to-own":
            choices = up_to_own(model, specs)
    attendance = None if table.baseline else attendance_of(config, parts, works)
    timetable = None
    if config.mode == "async":
        assert attendance is not None  # the file refuses a baseline
        timetable = timetable_of(config, attendance)
        folder.kept_models = timetable.max_staleness + 1
    return Simulation(
        config,
        folder,
        model,
        data.samples,
        held_out,
        specs,
        choices,
        parts,
        attendance,
        timetable,
        kinds=[kind.name for kind in config.kinds()],
        judged=model.policy.judge and config.mode == "sync" and table.baseline is None,
    )


class SimulationData(NamedTuple):
    """The samples for the clients, samples to evaluate the global model, and the writers if known.

    If `held_out` is None, a share of the samples is held out.
    """

    samples: LocalData
    held_out: tuple[np.ndarray, np.ndarray] | None
    writers: np.ndarray | None


def read_data(config: SimulationConfig, program: Program) -> SimulationData:
    """Read the data that the federation's file names, with the types that `program` requires."""

    def load(source: Data) -> LocalData:
        return load_data(
            source,
            config.input_shape,
            program.labels,
            program.sample_dtype,
            program.sample_limit,
            preprocessing=config.data,
            parts=program.parts,
        )

    table, held_out, writers = config.simulation, None, None
    if table.format is None:
        samples = load(table.data)
    else:
        train, test = read_dataset(table.format, Path(table.data), config.input_shape)
        samples, writers = load((train.x, train.y)), train.writers
        if config.held_out is None:
            judges = load((test.x, test.y))
            held_out = judges.x, judges.y
    if config.held_out is not None:
        held_out = own_samples(config, config.held_out)
    return SimulationData(samples, held_out, writers)


def up_to_own(model: Federation, specs: Iterable[str]) -> Choices:
    """Map each spec to itself and the specs that train at most as many parameters (FjORD)."""
    sizes = {spec: model.submodel(spec).counts.params for spec in dict.fromkeys(specs)}
    return {
        own: [spec for spec, size in sizes.items() if size <= most] for own, most in sizes.items()
    }


def refuse_personal_models(model: Federation, specs: Iterable[str]) -> None:
    """Raise InputError if a submodel in `specs` keeps a personal model.

    A client with a personal model cannot change its submodel, because its personal model fits only
    this submodel.
    """
    for spec in dict.fromkeys(specs):
        if any(entry.role == "personal" for entry in model.submodel(spec).program.tensors):
            raise InputError(
                'Clients that train "{submodel}" keep a personal model, so they cannot change '
                'their submodel from round to round. Set capacities = "fixed".',
                code="simulation.personal-model",
                submodel=spec,
            )


def partition(
    table: SimulationTable,
    labels: np.ndarray,
    clients: int,
    order: np.random.Generator,
    writers: np.ndarray | None = None,
) -> Parts:
    """Share the samples, with their `labels` and `writers`, among `clients`, as `table` says.

    Raises InputError for too few samples, and for a partition by labels without classes.
    """
    if writers is not None and table.partition == "writers":
        return writer_split(writers, clients, order)
    if table.partition != "iid" and (labels.ndim != 1 or labels.dtype != np.int64):
        raise InputError(
            'partition = "{partition}" needs one class for each sample; the labels are {dtype} '
            '{shape}. Set partition = "iid".',
            code="simulation.no-classes",
            partition=table.partition,
            dtype=labels.dtype.name,
            shape=labels.shape,
        )
    if table.partition == "dirichlet":
        return dirichlet_split(labels, clients, table.alpha or ALPHA, order)
    if table.partition == "shards":
        return shard_split(labels, clients, table.shards or SHARDS, order)
    return iid_split(len(labels), clients, order)
