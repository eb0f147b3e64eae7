"""Training steps on an emulated ARM board: processor time beside PyTorch's, on one thread.

`python bench_arm64.py PYTHON` writes the graphs here and runs them in PYTHON, an emulated one with
the runtimes and with PyTorch. Under emulation every instruction takes about the same time, so the
figures count instructions. Run `make bench-arm64`; options: --case NAME, --steps N.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from bench_step import WINOGRAD, Peer, check_losses, take_turns, write_graph
from step_cases import CASES, Case, eager

from profiles.errors import ExportError

BATCH = 8
TITLES = {WINOGRAD: "ONNX Runtime", "litert": "LiteRT"}
"""The runtimes. Neither has blocked convolutions on 64-bit ARM, so convolutions are Winograd's."""


def write_eager(case: Case, folder: Path) -> Path:
    saved = folder / "pytorch.pt"
    torch.save(eager(case), saved)
    return saved


@contextmanager
def opened(name: str, python: str) -> Iterator[tuple[dict[str, Peer], dict[str, str]]]:
    """The peers of the case `name`, PyTorch's first, and why others are missing."""
    case = replace(CASES[name], batch=BATCH)
    peers: dict[str, Peer] = {}
    refused = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        writers: dict[str, Callable[[], Path]] = {"pytorch": partial(write_eager, case, folder)}
        for kind in TITLES:
            writers[kind] = partial(write_graph, case, "train", kind, folder)
        for kind, write in writers.items():
            try:
                peer = Peer(kind, name, write(), 1, python, warm_up=0)
            except ExportError as error:
                refused[kind] = str(error.code)
                continue
            if isinstance(peer.loss, str):
                refused[kind] = peer.loss
            else:
                peers[kind] = peer
        yield peers, refused
        for peer in peers.values():
            peer.stop()


def compare(name: str, python: str, steps: int) -> float:
    """Print the row of one case; return the ratio of the best runtime."""
    with opened(name, python) as (peers, refused):
        check_losses(name, peers)
        seconds = take_turns(peers, steps, "processor")
    medians = {kind: statistics.median(times) for kind, times in seconds.items()}
    ratios = {kind: medians[kind] / medians["pytorch"] for kind in TITLES if kind in medians}
    cells = [
        f"{medians[kind]:.2f} s, {ratios[kind]:.2f}" if kind in ratios else refused[kind]
        for kind in TITLES
    ]
    best = min(ratios.values())
    cells = [name, f"{medians['pytorch']:.2f} s", *cells, f"{best:.2f}"]
    print(f"| {' | '.join(cells)} |", flush=True)
    return best


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("python", metavar="PYTHON")
    options.add_argument("--case", action="append", choices=CASES)
    options.add_argument("--steps", type=int, default=3)
    chosen = options.parse_args()
    columns = ["case", "PyTorch", *TITLES.values(), "best"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    best = [compare(name, chosen.python, chosen.steps) for name in chosen.case or CASES]
    print(f"best runtime over PyTorch, median: {statistics.median(best):.2f}")


if __name__ == "__main__":
    main()
