"""What a client of each peer needs without a federation: disk, imports, a round's training."""

import os
import subprocess
import tempfile
from pathlib import Path

from bench_agent import measure, size
from peers.compared_systems import ENVIRONMENTS, PEERS, SOURCES
from peers.problem import BATCH, EPOCHS, MOMENTUM, RATE, Problem
from retired_graph import write_retired
from step_cases import Case, whole

TRAINING = {"edgetailor": "edgetailor", "flower": "torch", "nvflare": "torch"}
RETIRED = "import flwr.app, flwr.clientapp, onnxruntime"
SCRIPT = SOURCES / "local_training.py"


def print_alone(problem: Problem) -> None:
    print("| | environment, MB | lines of the user | import, s | memory, MB | training, s | MB |")
    print("|" + "---|" * 7)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        problem.write(folder)
        write_bundle(problem, folder)
        for name, peer in PEERS.items():
            training = TRAINING[peer.environment]
            lines = sum(lines_of(SOURCES / peer.environment / file) for file in peer.written)
            print_row(name, peer.environment, peer.imports, training, folder, str(lines))
        if python_of("retired").exists():
            shape = problem.shape()
            case = Case(problem.net, "full", shape, whole, shape, momentum=0.0, batch=BATCH)
            write_retired(case, folder, str(python_of("retired")))
            print_row("Flower, onnxruntime-training", "retired", RETIRED, "retired", folder, "")


def python_of(environment: str) -> Path:
    return ENVIRONMENTS / environment / "bin" / "python"


def print_row(
    name: str, environment: str, imports: str, training: str, folder: Path, lines: str
) -> None:
    python = python_of(environment)
    used, _, memory = measure(python, imports, folder, 5)
    done = subprocess.run(
        [python, SCRIPT, training, folder],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(folder)},
        check=True,
        capture_output=True,
        text=True,
    )
    seconds, peak = map(float, done.stdout.split())
    cells = [f"{size(ENVIRONMENTS / environment) / 1e6:.0f}", lines, f"{used:.2f}"]
    cells += [f"{memory / 1e6:.0f}", f"{seconds:.3f}", f"{peak / 1e6:.0f}"]
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


def write_bundle(problem: Problem, folder: Path) -> None:
    """The bundle of the whole model that EdgeTailor's agents get, with its first weights."""
    import edgetailor

    model = problem.net()
    training = edgetailor.TrainingConfig(
        batch_size=BATCH, epochs=EPOCHS, learning_rate=RATE, momentum=MOMENTUM
    )
    submodel = edgetailor.split(model, "full", problem.shape(), training)
    edgetailor.export(submodel, edgetailor.GlobalModel(model.state_dict()), folder / "bundle")


def lines_of(path: Path) -> int:
    """Lines of a file that are neither empty nor comments nor a docstring of one line."""
    lines = map(str.strip, path.read_text().splitlines())
    return sum(bool(line) and not line.startswith(("#", '"""')) for line in lines)
