"""Peak memory of one training step: predicted from the graph, measured, and PyTorch's beside it.

Every measurement is a process of its own on one thread: its resident set once all is imported, some
steps, the kernel's peak set back (/proc/self/clear_refs), more steps, the peak above the first
figure. Linux only. Run `make bench-memory`; options: --case NAME, --alive N.
"""

import argparse
import tempfile
from pathlib import Path

from bench_step import Peer, write_graph
from step_cases import BATCH, CASES, Case, whole

from exporters.footprint import footprint
from profiles.errors import ExportError
from toolkit import models

DIGITS = (8, 8)
PERSONAL = {
    "digits_cnn cp:2.0": Case(models.digits_cnn, "cp:2.0", (1, *DIGITS), whole, (1, *DIGITS))
}
"""Measured in their `personal_step`, which has no plain counterpart in PyTorch."""
MB = 1e6


def memory(kind: str, name: str, graph: Path) -> float:
    peer = Peer(kind, name, graph, 1)
    peak = peer.ask("memory")
    peer.stop()
    return peak


def report(name: str, alive: int) -> None:
    """Print the row of one case, and the `alive` largest tensors of its planned peak."""
    case, signature = (CASES[name], "train") if name in CASES else (PERSONAL[name], "personal_step")
    with tempfile.TemporaryDirectory() as scratch:
        graph = write_graph(case, signature, "onnx", Path(scratch))
        found = footprint(graph.read_bytes(), BATCH)
        peak = memory("onnx", name, graph)
        row = [f"{bytes_ / MB:.1f}" for bytes_ in (found.planned, found.arena, found.process, peak)]
        row.append(f"{100 * (found.process / peak - 1):+.1f}%")
        if name in CASES:
            eager = memory("pytorch", name, graph)
            row += [f"{eager / MB:.1f}", f"{peak / eager:.2f}"]
        else:
            row += ["-", "-"]
    print(f"| {name} | {' | '.join(row)} |", flush=True)
    for buffer in found.alive[:alive]:
        print(f"  {buffer.size / MB:8.2f}  {buffer.name}")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--case", action="append", choices=[*CASES, *PERSONAL])
    options.add_argument("--alive", type=int, default=0, help="list N tensors of the planned peak")
    chosen = options.parse_args()
    print("| MB, batch 32 | planned | arena | predicted peak | peak | off | PyTorch | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for name in chosen.case or [*CASES, *PERSONAL]:
        try:
            report(name, chosen.alive)
        except ExportError as error:
            print(f"| {name} | {error} |")


if __name__ == "__main__":
    main()
