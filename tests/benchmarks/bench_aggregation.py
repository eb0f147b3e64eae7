"""Time and memory of aggregating low-rank updates of ResNet-18, beside numpy adding their bytes.

    PYTHONPATH=.:tests python tests/benchmarks/bench_aggregation.py --updates 1000

Updates are tensor files in the page cache, read one at a time as the coordinator does. numpy reads
the same files and adds them up without recovering anything. Both take turns, so that
they meet the same load. The peak is measured in a separate process, from before the model is built.
"""

import argparse
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save

from device_agent.formats.atomic_files import fingerprint
from device_agent.formats.manifest import Role, TensorEntry
from device_agent.formats.tensor_files import read_tensors
from device_agent.formats.update import UpdateRecord
from toolkit.aggregation.aggregate import Aggregation
from toolkit.aggregation.aggregation_policy import AggregationPolicy
from toolkit.submodels.global_model import GlobalModel
from updates import entry

TURN = 20
"""Updates that one side takes before it is the other's turn."""

Shape = tuple[int, ...]


def norm(name: str, channels: int) -> dict[str, Shape]:
    leaves = ("weight", "bias", "running_mean", "running_var")
    return {f"{name}.{leaf}": (channels,) for leaf in leaves}


def resnet18() -> dict[str, Shape]:
    """Shapes of ResNet-18 for 32 x 32 images and ten classes."""
    shapes: dict[str, Shape] = {"stem.weight": (64, 3, 3, 3), **norm("stem_norm", 64)}
    inputs = 64
    for stage, outputs in enumerate((64, 128, 256, 512)):
        for number in range(2):
            block = f"blocks.{stage}.{number}"
            for conv, channels in (("conv1", inputs), ("conv2", outputs)):
                shapes[f"{block}.{conv}.weight"] = (outputs, channels, 3, 3)
                shapes |= norm(f"{block}.{conv}_norm", outputs)
            if inputs != outputs:
                shapes[f"{block}.shortcut.weight"] = (outputs, inputs, 1, 1)
                shapes |= norm(f"{block}.shortcut_norm", outputs)
            inputs = outputs
    return {**shapes, "classifier.weight": (10, 512), "classifier.bias": (10,)}


def low_rank_table(ratio: float) -> tuple[TensorEntry, ...]:
    """What a device of `low-rank:ratio` uploads: the 3 x 3 convolutions after the stem factored."""
    table = []
    for name, shape in resnet18().items():
        if shape[2:] != (3, 3) or name == "stem.weight":
            role: Role = "buffer" if "running" in name else "parameter"
            table.append(entry(name, shape, name, role=role))
            continue
        outputs, inputs, rows, columns = shape
        rank = math.floor(ratio * outputs + 0.5)
        layer = name.removesuffix(".weight")
        table.append(entry(f"{layer}.u.weight", (rank, inputs, rows, 1), name, "u"))
        table.append(entry(f"{layer}.v.weight", (outputs, rank, 1, columns), name, "v"))
    return tuple(table)


def write_updates(folder: Path, table: tuple[TensorEntry, ...], files: int) -> None:
    draw = np.random.default_rng(0)
    for number in range(files):
        # Positive, as variances are.
        arrays = {e.name: draw.random(e.shape, np.float32) for e in table}
        (folder / f"{number}.safetensors").write_bytes(save(arrays))


def record_of(ratio: float, table: tuple[TensorEntry, ...]) -> UpdateRecord:
    return UpdateRecord(
        bundle="",
        base="",
        submodel=f"low-rank:{ratio:g}",
        samples=100,
        steps=1,
        loss_first=1.0,
        loss_last=1.0,
        tensors=table,
        file=fingerprint(b""),
    )


class Aggregating:
    """The side that is measured."""

    def __init__(self, ratio: float) -> None:
        model = GlobalModel({name: torch.ones(shape) for name, shape in resnet18().items()})
        self.aggregation = Aggregation(model, AggregationPolicy())
        self.record = record_of(ratio, low_rank_table(ratio))

    def take(self, path: Path) -> None:
        self.aggregation.add(self.record, read_tensors(path))

    def end(self) -> None:
        self.aggregation.result()


class Adding:
    """numpy's side: float32 from the page cache, added up."""

    def __init__(self, size: int, numbers: int) -> None:
        self.offset, self.sum = size - 4 * numbers, np.zeros(numbers, np.float32)

    def take(self, path: Path) -> None:
        self.sum += np.fromfile(path, np.float32, offset=self.offset)

    def end(self) -> None:
        self.sum /= 1.0


def cycled(folder: Path, updates: int) -> Iterator[Path]:
    paths = sorted(folder.iterdir())
    return (paths[number % len(paths)] for number in range(updates))


def measure_time(folder: Path, ratio: float, updates: int) -> tuple[float, float]:
    """Seconds of aggregating and of numpy."""
    numbers = sum(math.prod(e.shape) for e in low_rank_table(ratio))
    sides = (Aggregating(ratio), Adding(next(folder.iterdir()).stat().st_size, numbers))
    seconds = [0.0, 0.0]
    paths = list(cycled(folder, updates))
    for start in range(0, updates, TURN):
        for number, side in enumerate(sides):
            began = time.perf_counter()
            for path in paths[start : start + TURN]:
                side.take(path)
            seconds[number] += time.perf_counter() - began
    for number, side in enumerate(sides):
        began = time.perf_counter()
        side.end()
        seconds[number] += time.perf_counter() - began
    return seconds[0], seconds[1]


def peak_rss() -> int:
    """Most memory that this process has had, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def peak_in_models(folder: Path, ratio: float, updates: int) -> float:
    """Growth of this process's peak while it aggregates, in global models of float32."""
    warm = torch.ones(256, 256)
    warm.addmm_(warm, warm)  # the matrix library's own buffers are no model's
    before = peak_rss()
    side = Aggregating(ratio)
    for path in cycled(folder, updates):
        side.take(path)
    side.end()
    return (peak_rss() - before) / (4 * sum(map(math.prod, resnet18().values())))


def in_child(folder: Path, arguments: argparse.Namespace) -> float:
    command = [sys.executable, __file__, "--peak-of", str(folder)]
    options = ["--ratio", str(arguments.ratio), "--updates", str(arguments.updates)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--files", type=int, default=40, help="distinct updates, cycled")
    parser.add_argument("--ratio", type=float, default=0.5, help="rank ratio")
    parser.add_argument("--peak-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak_of is not None:
        print(peak_in_models(arguments.peak_of, arguments.ratio, arguments.updates))
        return
    table = low_rank_table(arguments.ratio)
    numbers = sum(math.prod(e.shape) for e in table)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_updates(folder, table, min(arguments.files, arguments.updates))
        ours, numpys = measure_time(folder, arguments.ratio, arguments.updates)
        peak = in_child(folder, arguments)
    full = sum(map(math.prod, resnet18().values()))
    print(f"{arguments.updates} updates of ResNet-18, low-rank:{arguments.ratio:g}")
    print(f"{numbers:,} of {full:,} numbers each, {torch.get_num_threads()} threads")
    print("           MB/s  ms/update")
    for side, seconds in (("aggregate", ours), ("numpy", numpys)):
        each = seconds / arguments.updates
        print(f"{side:9} {4e-6 * numbers / each:6.0f} {1e3 * each:10.1f}")
    print(f"time ratio {ours / numpys:.2f}, peak {peak:.2f} models")


if __name__ == "__main__":
    main()
