"""Processor time and peak memory of exports, by stage, each in a process of its own on one thread.

Run `make bench-export`; in ARGS, `--model REFERENCE SHAPE SPEC` (repeatable) replaces the models,
and `--beside FOLDER` exports with another checkout of the project, too. Peaks are in MiB above the
resident set once all is imported. `--again` exports once more, with another family and in the other
format instead, where the caches are filled. Linux only.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

HERE = Path(__file__).resolve()
MODELS = (
    ("toolkit.models:resnet20", "3,32,32", "full"),
    ("toolkit.models:resnet18", "3,32,32", "full"),
    ("bench_export:convolutions", "3,16,16", "cp:2.0"),
)
STAGES = {
    "load": ("toolkit.exporting.model_export", "load_global"),
    "record, split": ("toolkit.exporting.model_export", "split"),
    "trace, lower": ("exporters.export", "lower"),
    "forms, memory": ("exporters.export", "with_forms"),
    "verify": ("exporters.export", "verify"),
    "count": ("toolkit.exporting.model_export", "cost"),
}
MIB = 2**20


def convolutions() -> nn.Module:
    """80 small convolutions, one after the other."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU()]
    for _ in range(79):
        layers += [nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def worker(model: str, shape: str, spec: str) -> None:
    """Export once; print processor seconds and peak of each stage, and the size of the bundle."""
    from device_agent.system.process_memory import peak_bytes, reset_peak, resident_bytes
    from toolkit.exporting.model_export import Request, export_bundle

    figures: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    imports, idle = time.process_time(), resident_bytes() or 0
    highest = [0]

    def peak() -> int:
        highest[0] = max(highest[0], peak_bytes() or 0)
        return peak_bytes() or 0

    def timed(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            peak()
            reset_peak()
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                seconds, most = figures[stage]
                most = max(most, (peak() - idle) / MIB)
                figures[stage] = [seconds + time.process_time() - start, most]

        return wrapped

    for stage, (module, name) in STAGES.items():
        setattr(sys.modules[module], name, timed(stage, getattr(sys.modules[module], name)))
    with TemporaryDirectory() as folder:
        out = Path(folder, "bundle")
        export_bundle(Request(model, tuple(map(int, shape.split(","))), spec, out, cache=False))
        weights = (out / "weights.safetensors").stat().st_size / MIB
    peak()
    used = resource.getrusage(resource.RUSAGE_SELF)
    total = [used.ru_utime + used.ru_stime, (highest[0] - idle) / MIB]
    rest = total[0] - imports - sum(seconds for seconds, _ in figures.values())
    figures |= {"imports": [imports, 0.0], "other": [rest, 0.0], "total": total}
    print(json.dumps({"weights": weights, "figures": figures}))


def worker_again(model: str, shape: str, spec: str) -> None:
    """Print the processor seconds of an export, and of others that share its caches."""
    from toolkit.exporting.model_export import Request, export_from, load_origin

    seconds, origin = {}, None
    with TemporaryDirectory() as folder:
        os.environ["EDGETAILOR_CACHE"] = f"{folder}/cache"
        for name, other, format in (
            ("first export", spec, "onnx"),
            ("same again", spec, "onnx"),
            ("second family", "low-rank:0.5", "onnx"),
            ("second format", spec, "tflite"),
        ):
            start = time.process_time()
            sizes, out = tuple(map(int, shape.split(","))), Path(folder, name)
            request = Request(model, sizes, other, out, format=format)
            origin = origin or load_origin(request)
            export_from(origin, request)
            seconds[name] = time.process_time() - start
    print(json.dumps(seconds))


def measured(checkout: Path, model: tuple[str, str, str], worker: str = "worker") -> dict[str, Any]:
    """What `worker` prints with the code of `checkout`."""
    path = os.pathsep.join([str(checkout), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    done = subprocess.run(
        [sys.executable, "-c", f"import bench_export; bench_export.{worker}{model}"],
        cwd=checkout,
        env={**os.environ, **threads, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    """Print a Markdown table for each model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", nargs=3, action="append", metavar=("REFERENCE", "SHAPE", "SPEC"))
    parser.add_argument("--beside", type=Path, action="append", default=[])
    parser.add_argument("--again", action="store_true")
    arguments = parser.parse_args()
    if arguments.again:
        for model in arguments.model or MODELS[:2]:
            seconds = measured(HERE.parents[2], tuple(model), "worker_again")
            first = seconds["first export"]
            print(f"\n{' '.join(model)}\n\n| export | s | of the first |\n|---|--:|--:|")
            for name, value in seconds.items():
                print(f"| {name} | {value:.1f} | {value / first:.2f} |", flush=True)
        return
    checkouts = [*arguments.beside, HERE.parents[2]]
    for model in arguments.model or MODELS:
        results = [measured(checkout.resolve(), tuple(model)) for checkout in checkouts]
        print(f"\n{' '.join(model)}: {results[-1]['weights']:.0f} MiB of weights\n")
        print("| stage |" + " s | MiB |" * len(results))
        print("|---|" + "--:|--:|" * len(results))
        for stage in ("imports", *STAGES, "other", "total"):
            rows = [result["figures"].get(stage, [0.0, 0.0]) for result in results]
            cells = "".join(f" {seconds:.1f} | {peak:.0f} |" for seconds, peak in rows)
            print(f"| {stage} |{cells}", flush=True)


if __name__ == "__main__":
    main()
