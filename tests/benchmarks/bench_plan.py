"""What the planner predicts against what is measured: memory and time of a training step.

Every submodel trains in a process of its own on one thread. Calibration and measurement take turns
for several rounds, and of both the least counts: processor time, so that what else the machine does
disturbs neither much. Nothing of the models that are judged is in the calibration. Linux only. Run
`make bench-plan`; it writes its table into docs/predictions.md, and what the table comes to into
docs/benchmarks.md. Options: --rounds N, --model NAME,
--graphs DIR (kept from run to run), --dry-run.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from bench_step import Peer
from torch import Tensor, nn

import edgetailor
from device_agent.formats.graph_forms import BLOCKS, blocked_form, form_file
from device_agent.formats.manifest import Port, Train
from device_agent.profiling.calibration import calibrate
from exporters.memory.liveness import in_place_of
from exporters.memory.onnx_footprint import SizedGraph
from exporters.onnx.forms.blocked_layout import blocked
from exporters.onnx.graph_workload import graph_work, with_forms
from exporters.onnx.onnx_writer import to_onnx
from profiles.cost_model.prediction import predict
from profiles.cost_model.workload import SignatureWork, Workload
from profiles.documents.calibration_record import Calibration, Timing
from profiles.errors import EdgeTailorError
from toolkit import models
from toolkit.submodels.global_model import from_model
from toolkit.submodels.submodel import Submodel

DOCS = Path(__file__).parents[2] / "docs"
BEGIN, END = "<!-- bench-plan -->", "<!-- /bench-plan -->"
BATCH = 32
LENGTH_S = 2.0
STEPS = 5
CALIBRATION_S = 25.0


class Transformer(nn.Module):
    """PyTorch's encoder layers on sequences of vectors."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(x).mean(1))
        return out


class Model(NamedTuple):
    """How it is made, a sample's shape, the submodels to judge, and how many words it knows."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    specs: Sequence[str]
    words: int = 0


MODELS = {
    "digits_cnn": Model(
        models.digits_cnn,
        (1, 8, 8),
        (
            *("full", "low-rank:0.5", "low-rank:0.25", "width:0.5", "width:0.25", "cp:2", "pfedme"),
            *("slice:units.1.bn", "slice:units.2.bn", "slice:units.2.bn+low-rank:0.25"),
        ),
    ),
    "mnist_dnn": Model(
        models.mnist_dnn, (1, 28, 28), ("full", "low-rank:0.25,keep=0", "width:0.5", "cp:2")
    ),
    "femnist_cnn": Model(
        models.femnist_cnn,
        (1, 28, 28),
        ("full", "low-rank:0.25", "width:0.75", "width:0.5", "width:0.25", "slice:0.9"),
    ),
    "transformer": Model(
        Transformer, (32, 64), ("full", "low-rank:0.5", "low-rank:0.25", "slice:0.6")
    ),
    "imdb_bilstm": Model(models.imdb_bilstm, (256,), ("full", "low-rank:0.25,keep=0"), 10_000),
    "resnet20": Model(
        models.resnet20,
        (3, 32, 32),
        (
            *("full", "low-rank:0.25", "width:0.5", "width:0.25", "slice:blocks.3"),
            *("slice:blocks.6", "slice:blocks.3+low-rank:0.25"),
        ),
    ),
    "vgg8": Model(models.vgg8, (3, 32, 32), ("full", "width:0.5", "low-rank:0.25")),
    "resnet18": Model(models.resnet18, (3, 32, 32), ("width:0.25", "low-rank:0.25")),
}


@dataclass
class Judged:
    """A submodel with what was predicted from, and what was measured so far."""

    model: str
    spec: str
    folder: Path
    work: Workload
    seconds: float = float("inf")
    bytes: float = 0.0

    @property
    def steps(self) -> list[str]:
        return [f"{work.name}*{work.times}" for work in self.work.training]


def arrays(model: Model, submodel: Submodel, ports: Sequence[Port]) -> dict[str, np.ndarray]:
    """What a step is fed: weights, small numbers for other state, a random batch."""
    order = np.random.default_rng(0)
    values = submodel.cut(from_model(model.make()))
    fed = {}
    for port in ports:
        shape = [BATCH if size is None else size for size in port.shape]
        if port.kind == "samples" and model.words and port.dtype == "int64":
            fed[port.name] = order.integers(model.words, size=shape)
        elif port.kind == "samples":
            fed[port.name] = order.standard_normal(shape, np.float32)
        elif port.dtype == "int64":
            fed[port.name] = np.zeros(shape, np.int64)
        elif port.state in values:
            fed[port.name] = values[port.state].detach().numpy()
        else:
            fed[port.name] = np.full(shape, 0.01, np.float32)
    return fed


def prepare(name: str, spec: str, folder: Path) -> Judged:
    """Write the graphs that train `spec`, and their feeds, to `folder` unless they are there."""
    known = folder / "work.json"
    if not known.exists():
        folder.mkdir(parents=True, exist_ok=True)
        known.write_bytes(msgspec.json.encode(write_graphs(MODELS[name], spec, folder)))
    return Judged(name, spec, folder, msgspec.json.decode(known.read_bytes(), type=Workload))


def write_graphs(model: Model, spec: str, folder: Path) -> Workload:
    torch.manual_seed(0)
    training = edgetailor.TrainingConfig(batch_size=BATCH, learning_rate=1e-4)
    submodel = edgetailor.split(model.make(), spec, model.shape, training)
    signatures = {signature.name: signature for signature in submodel.program.signatures}
    steps = [s for i in submodel.program.schedule if isinstance(i, Train) for s in i.steps]
    state: dict[str, np.ndarray] = {}
    works: list[SignatureWork] = []
    for step in steps:
        signature = signatures[step.signature]
        graph = to_onnx(signature)
        file = folder / f"{signature.name}.onnx"
        file.write_bytes(graph)
        for block in BLOCKS:
            if form := blocked(graph, block, BATCH):
                file.with_name(form_file(file.name, blocked_form(block))).write_bytes(form)
        names = [port.name for port in signature.inputs]
        over = {name: name.removesuffix("+") for name in in_place_of(graph)}
        (folder / f"{signature.name}.json").write_text(json.dumps([names, over]))
        fed = arrays(model, submodel, signature.inputs)
        state |= fed
        held = sum(fed[p.name].nbytes for p in signature.inputs if p.kind == "state")
        sized = SizedGraph(graph, BATCH)
        work = graph_work(sized, signature.name, held, step.times)
        works.append(with_forms(work, sized))
    np.savez(folder / "state.npz", **state)  # type: ignore[arg-type]
    own = {p.name for s in steps for p in signatures[s.signature].inputs if p.kind == "state"}
    return Workload(
        recording=(),
        training=tuple(works),
        state=sum(state[n].nbytes for n in own),
        down=submodel.bytes,
        up=0,
    )


def measure(judged: Judged) -> None:
    """One more round of `judged`: the least time and the largest memory count."""
    peer = Peer("batches", " ".join(judged.steps), judged.folder, 1)
    judged.bytes = max(judged.bytes, peer.ask("memory"))
    end, done = time.monotonic() + LENGTH_S, 0
    while done < STEPS or time.monotonic() < end:
        judged.seconds = min(judged.seconds, peer.ask("processor"))
        done += 1
    peer.stop()


def least(calibrations: Sequence[Calibration]) -> Calibration:
    """One calibration of the least that each of several found."""
    seconds: dict[tuple[str, tuple[int, ...]], float] = {}
    for timing in (t for calibration in calibrations for t in calibration.timings):
        key = (timing.kind, timing.sizes)
        seconds[key] = min(seconds.get(key, timing.seconds), timing.seconds)
    return msgspec.structs.replace(
        calibrations[-1],
        timings=tuple(Timing(kind, sizes, least_s) for (kind, sizes), least_s in seconds.items()),
        **{
            name: min(getattr(calibration, name) for calibration in calibrations)
            for name in ("run_s", "port_s", "node_s", "loop_step_s")
        },
    )


class Line(NamedTuple):
    """A submodel's figures; errors are predicted over measured, less one."""

    name: str
    memory: tuple[float, float, float]
    step: tuple[float, float, float]

    @property
    def memory_error(self) -> float:
        return self.memory[0] / self.memory[2] - 1

    @property
    def step_error(self) -> float:
        return self.step[0] / self.step[2] - 1

    def __str__(self) -> str:
        memory = " | ".join(f"{size / 1e6:.1f}" for size in self.memory)
        step = " | ".join(f"{seconds * 1e3:.3g}" for seconds in self.step)
        errors = f"{self.memory_error:+.1%} | {step} | {self.step_error:+.1%}"
        return f"| {self.name} | {memory} | {errors} |"


def line(judged: Judged, calibration: Calibration) -> Line:
    predicted = predict(judged.work, calibration)
    assert calibration.memory is not None
    assert predicted.step is not None
    idle = calibration.memory.idle_bytes
    return Line(
        f"`{judged.model}` {judged.spec}",
        (predicted.memory.value - idle, predicted.memory.upper - idle, judged.bytes),
        (predicted.step.value, predicted.step.upper, judged.seconds),
    )


def table(lines: Sequence[Line]) -> list[str]:
    return [
        "| submodel | memory, MB: predicted | at most | measured | off "
        "| step, ms: predicted | at most | measured | off |",
        "|---|---|---|---|---|---|---|---|---|",
        *map(str, lines),
    ]


def summary(lines: Sequence[Line]) -> str:
    """What the table comes to, in one line."""
    memory = [line.memory_error for line in lines]
    step = [line.step_error for line in lines]
    above = [line.memory[2] / line.memory[1] - 1 for line in lines]
    late = [line.name for line in lines if line.step[2] > line.step[1]]
    worst = min(lines, key=lambda line: line.memory_error)
    off = max(lines, key=lambda line: abs(line.step_error))
    names = {line.name.split()[0] for line in lines}
    return (
        f"{len(lines)} submodels of {len(names)} models. Memory: "
        f"median error {statistics.median(map(abs, memory)):.1%}, worst under-prediction "
        f"{min(memory):+.1%} ({worst.name}); measured above the upper bound: "
        f"{sum(excess > 0 for excess in above)}. Step time: median error "
        f"{statistics.median(map(abs, step)):.1%} (signed {statistics.median(step):+.1%}), worst "
        f"{off.step_error:+.1%} ({off.name}); measured above the upper bound: {len(late)}."
    )


def rewrite(page: Path, text: Sequence[str]) -> None:
    """Put `text` between the marks in `page`."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text("\n".join([f"{before}{BEGIN}", *text, f"{END}{after}"]), encoding="utf-8")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--model", action="append", choices=MODELS)
    options.add_argument("--graphs", type=Path, help="folder that keeps the exported graphs")
    options.add_argument("--prepare", action="store_true", help="only export into --graphs")
    options.add_argument("--dry-run", action="store_true", help="leave the pages alone")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = chosen.graphs or Path(scratch)
        judged = []
        for name in chosen.model or MODELS:
            for spec in MODELS[name].specs:
                print(f"{time.strftime('%H:%M:%S')} exporting {name} {spec}", file=sys.stderr)
                try:
                    judged.append(prepare(name, spec, folder / f"{name}-{spec.replace(':', '-')}"))
                except EdgeTailorError as error:
                    print(error, file=sys.stderr)
        if chosen.prepare:
            return
        calibrations = []
        for number in range(chosen.rounds):
            print(f"{time.strftime('%H:%M:%S')} round {number + 1}", file=sys.stderr)
            calibrations.append(calibrate(1, CALIBRATION_S))
            for submodel in judged:
                measure(submodel)
    calibration = least(calibrations)
    lines = [line(submodel, calibration) for submodel in judged]
    text = [*table(lines), "", summary(lines)]
    print("\n".join(text))
    if not chosen.dry_run:
        rewrite(DOCS / "predictions.md", text)
        rewrite(DOCS / "benchmarks.md", text[-1:])


if __name__ == "__main__":
    main()
