"""`make bench-zoo`: training steps of ten stock models at 224 x 224 in batches of 16.

The agent's `bench` measures the exported bundles, each in a process of its own. Where PyTorch is
installed, the same model takes the same step in PyTorch beside it, in turns. On a board without
PyTorch, copy the folder of bundles there and run `edgetailor-agent bench bundles`.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

NAMES = (
    "resnet18",
    "squeezenet1_1",
    "regnet_y_400mf",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "shufflenet_v2_x0_5",
    "mnasnet0_5",
    "efficientnet_b0",
    "lcnet_050",
    "googlenet",
)
SHAPE, BATCH = (3, 224, 224), 16
WARM, MEASURED = 2, 7


def write_bundles(folder: Path) -> None:
    """Export the models that `folder` lacks, each in a process of its own."""
    for name in NAMES:
        if not (folder / name).exists():
            print(f"exporting {name}", flush=True)
            subprocess.run([sys.executable, __file__, "--export", name, str(folder)], check=True)


def write_bundle(name: str, folder: Path) -> None:
    """Export one model."""
    import torch

    import edgetailor as et
    from toolkit.submodels.global_model import from_model
    from zoo_models import MODELS

    torch.manual_seed(0)
    net = next(model for model in MODELS if model.name == name).make()
    submodel = et.split(net, "full", SHAPE, et.TrainingConfig(batch_size=BATCH, momentum=0.9))
    et.export(submodel, from_model(net), folder / name, verify=False)


def torch_step(name: str, threads: int) -> dict[str, float]:
    """Median seconds of a step in PyTorch, and the peak memory of this process in bytes."""
    import resource
    import statistics
    import time

    import torch

    from zoo_models import MODELS

    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(0)
    net = next(model for model in MODELS if model.name == name).make().train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(BATCH, *SHAPE), torch.randint(5, (BATCH,))
    seconds = []
    for _ in range(WARM + MEASURED):
        begun = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begun)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": statistics.median(seconds[WARM:]), "peak_bytes": peak}


def answer(command: list[str]) -> Any:
    """The document that `command` prints; None if the command fails."""
    run = subprocess.run(command, capture_output=True, text=True)
    return None if run.returncode else json.loads(run.stdout)


def measured(name: str, folder: Path, threads: int) -> str:
    """One line of the table."""
    agent = [sys.executable, "-m", "device_agent.cli", "bench", str(folder / name), "--json"]
    agent += ["--threads", str(threads), "--runs", str(MEASURED)]
    ours = answer(agent)
    theirs = answer(
        [sys.executable, __file__, "--torch", name, str(folder), f"--threads={threads}"]
    )
    cells = [name]
    seconds = peak = None
    if ours is not None:
        seconds, peak = (ours["bundles"][0][key] for key in ("seconds_per_batch", "peak_bytes"))
    cells += [number(seconds, 1, 3), number(peak, 1e-6, 0)]
    if theirs is not None:
        cells += [number(theirs["seconds"], 1, 3), number(theirs["peak_bytes"], 1e-6, 0)]
        cells += [number(seconds and seconds / theirs["seconds"], 1, 2)]
    return "| " + " | ".join(cells) + " |"


def number(value: float | None, unit: float, digits: int) -> str:
    """A cell; a dash for a measurement that failed."""
    return "-" if value is None else f"{value * unit:.{digits}f}"


def main() -> None:
    """Export, measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("zoo-bundles"))
    parser.add_argument("--threads", type=int, default=0, help="0: one for each core")
    parser.add_argument("--export", metavar="NAME", help="only export this model")
    parser.add_argument("--torch", metavar="NAME", help="only measure this model in PyTorch")
    options = parser.parse_args()
    if options.export:
        write_bundle(options.export, options.folder)
    elif options.torch:
        print(json.dumps(torch_step(options.torch, options.threads)))
    else:
        write_bundles(options.folder)
        print(
            "| model | agent s/batch | agent peak MB | PyTorch s/batch | PyTorch peak MB | ratio |"
        )
        print("|---|---|---|---|---|---|")
        for name in NAMES:
            print(measured(name, options.folder, options.threads), flush=True)


if __name__ == "__main__":
    main()
