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

import msgspec
import numpy as np
import torch
from safetensors.numpy import save

from device_agent.formats.manifest import TensorEntry, encode, uploaded
from device_agent.formats.tensor_files import read_tensors
from device_agent.formats.update import UpdateRecord
from device_agent.system.process_memory import peak_bytes
from edgetailor import split
from toolkit.aggregation.aggregate import Aggregation
from toolkit.aggregation.aggregation_policy import AggregationPolicy
from toolkit.models import resnet18
from toolkit.submodels.global_model import GlobalModel
from updates import record_of

TURN = 20
"""Updates that one side takes before it is the other's turn."""


def shapes() -> dict[str, tuple[int, ...]]:
    """The tensors of ResNet-18 for 32 x 32 images and ten classes; takes no memory for them."""
    with torch.device("meta"):
        state = resnet18().state_dict()
    return {name: tuple(t.shape) for name, t in state.items() if t.is_floating_point()}


def record(ratio: float) -> UpdateRecord:
    """What a device of `low-rank:ratio` uploads."""
    submodel = split(resnet18(), f"low-rank:{ratio:g}", (3, 32, 32))
    return record_of(str(submodel.spec), 100, uploaded(submodel.program.tensors))


def write_updates(folder: Path, table: tuple[TensorEntry, ...], files: int) -> None:
    draw = np.random.default_rng(0)
    for number in range(files):
        # Positive, as variances are.
        arrays = {e.name: draw.random(e.shape, np.float32) for e in table}
        (folder / f"{number}.safetensors").write_bytes(save(arrays))


class Aggregating:
    """The side that is measured."""

    def __init__(self, record: UpdateRecord) -> None:
        model = GlobalModel({name: torch.ones(shape) for name, shape in shapes().items()})
        self.aggregation, self.record = Aggregation(model, AggregationPolicy()), record

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


def measure_time(folder: Path, record: UpdateRecord, updates: int) -> tuple[float, float]:
    """Seconds of aggregating and of numpy."""
    numbers = sum(math.prod(e.shape) for e in record.tensors)
    sides = (Aggregating(record), Adding(next(folder.iterdir()).stat().st_size, numbers))
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


def peak_in_models(folder: Path, record: UpdateRecord, updates: int) -> float:
    """Growth of this process's peak while it aggregates, in global models of float32."""
    warm = torch.ones(256, 256)
    warm.addmm_(warm, warm)  # the matrix library's own buffers are no model's
    before = peak_bytes() or 0
    side = Aggregating(record)
    for path in cycled(folder, updates):
        side.take(path)
    side.end()
    return ((peak_bytes() or 0) - before) / (4 * sum(map(math.prod, shapes().values())))


def in_child(folder: Path, record: UpdateRecord, updates: int) -> float:
    """The same in a process of its own, which reads the record: splitting a model takes memory."""
    command = [sys.executable, __file__, "--peak-of", str(folder), "--updates", str(updates)]
    done = subprocess.run(command, input=encode(record), capture_output=True, check=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--files", type=int, default=40, help="distinct updates, cycled")
    parser.add_argument("--ratio", type=float, default=0.5, help="rank ratio")
    parser.add_argument("--peak-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak_of is not None:
        taken = msgspec.json.decode(sys.stdin.buffer.read(), type=UpdateRecord)
        print(peak_in_models(arguments.peak_of, taken, arguments.updates))
        return
    update = record(arguments.ratio)
    numbers = sum(math.prod(e.shape) for e in update.tensors)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_updates(folder, update.tensors, min(arguments.files, arguments.updates))
        ours, numpys = measure_time(folder, update, arguments.updates)
        peak = in_child(folder, update, arguments.updates)
    full = sum(map(math.prod, shapes().values()))
    print(f"{arguments.updates} updates of ResNet-18, low-rank:{arguments.ratio:g}")
    print(f"{numbers:,} of {full:,} numbers each, {torch.get_num_threads()} threads")
    print("           MB/s  ms/update")
    for side, seconds in (("aggregate", ours), ("numpy", numpys)):
        each = seconds / arguments.updates
        print(f"{side:9} {4e-6 * numbers / each:6.0f} {1e3 * each:10.1f}")
    print(f"time ratio {ours / numpys:.2f}, peak {peak:.2f} models")


if __name__ == "__main__":
    main()
