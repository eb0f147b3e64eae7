"""Peak memory of one training step: predicted from the graph, measured, and PyTorch's beside it.

Every measurement is a process of its own on one thread: its resident set once all is imported, some
steps, the kernel's peak set back (/proc/self/clear_refs), more steps, the peak above the first
figure. Linux only. Run `make bench-memory`; options: --case NAME, --runtime NAME, --alive N.

`plain` is ONNX Runtime with the plain graph, `onnx` with the form that the agent runs here.

With --recompute: ONNX steps that compute no, some or many activations again.
"""

import argparse
import statistics
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from bench_step import PLAIN_FORM, Peer, arrays, signature, take_turns
from step_cases import BATCH, CASES, Case, whole

from device_agent.formats.graph_forms import blocked_form, form_file
from device_agent.runtime.blocked_probe import block_size
from exporters.export import compile_graphs
from exporters.memory.onnx_footprint import Footprint, SizedGraph
from exporters.onnx.forms.blocked_layout import blocked, way_to_rewrite
from toolkit import models

DIGITS = (8, 8)
PERSONAL = {
    "digits_cnn cp:2.0": Case(models.digits_cnn, "cp:2.0", (1, *DIGITS), whole, (1, *DIGITS))
}
"""Measured in their `personal_step`, which has no plain counterpart in PyTorch."""
FORMS = (PLAIN_FORM, "onnx")
RUNTIMES = (*FORMS, "litert")
"""Those whose memory is predicted from the graph alone."""
MB = 1e6
WORDS = ("no", "some", "yes")
"""What the option `recompute` may be."""
EAGER_RUNS = 5
STEPS = 15
"""Steps of each peer that are timed."""


def memory(kind: str, name: str, graph: Path) -> float:
    peer = Peer(kind, name, graph, 1)
    peak = peer.ask("memory")
    peer.stop()
    return peak


@cache
def eager_memory(name: str) -> float:
    """PyTorch's peak, which varies by a tenth from process to process: the median of some."""
    return statistics.median(memory("pytorch", name, Path()) for _ in range(EAGER_RUNS))


def report(name: str, runtime: str, alive: int) -> None:
    """Print the row of one case, and the `alive` largest tensors of its planned peak."""
    case, step = (CASES[name], "train") if name in CASES else (PERSONAL[name], "personal_step")
    with tempfile.TemporaryDirectory() as scratch:
        graph, footprint = write_graph(case, step, runtime, Path(scratch))
        peak = memory(runtime, name, graph)
        row = [
            f"{bytes_ / MB:.1f}"
            for bytes_ in (footprint.planned, footprint.arena, footprint.process, peak)
        ]
        row.append(f"{100 * (footprint.process / peak - 1):+.1f}%")
        if name in CASES:
            eager = eager_memory(name)
            row += [f"{eager / MB:.1f}", f"{peak / eager:.2f}"]
        else:
            row += ["-", "-"]
    print(f"| {name} | {runtime} | {' | '.join(row)} |", flush=True)
    for buffer in footprint.alive[:alive]:
        print(f"  {buffer.size / MB:8.2f}  {buffer.name}")


def report_recomputed(name: str, form: str) -> None:
    """Print the row of one case: memory and time with each word of the option `recompute`."""
    cases = {w: replace(CASES[name], spec=f"{CASES[name].spec},recompute={w}") for w in WORDS}
    with tempfile.TemporaryDirectory() as scratch:
        peaks, predicted, peers = {}, {}, {}
        for word, case in cases.items():
            graph, footprint = write_graph(case, "train", form, Path(scratch, word))
            peaks[word], predicted[word] = memory(form, name, graph), footprint.process
            peers[word] = Peer(form, name, graph, 1)
        seconds = take_turns(peers, STEPS, "processor")
        for peer in peers.values():
            peer.stop()
    eager = eager_memory(name)
    row = [f"{peaks['no'] / MB:.1f}"]
    for word in WORDS[1:]:
        pairs = zip(seconds[word], seconds["no"], strict=True)
        ratio = statistics.median(again / kept for again, kept in pairs)
        off = 100 * (predicted[word] / peaks[word] - 1)
        row += [f"{peaks[word] / MB:.1f}", f"{off:+.1f}%", f"{peaks[word] / peaks['no']:.2f}"]
        row += [f"{ratio:.2f}", f"{peaks[word] / eager:.2f}"]
    print(f"| {name} | {form} | {' | '.join(row)} |", flush=True)


def write_graph(case: Case, name: str, runtime: str, folder: Path) -> tuple[Path, Footprint]:
    """The signature `name` of `case` as a graph, beside it what it is fed, and its memory."""
    submodel = case.submodel()
    chosen = signature(submodel, name)
    program = replace(submodel.program, signatures=(chosen,))
    kind = "tflite" if runtime == "litert" else "onnx"
    graph = compile_graphs(program, format=kind)[name]
    folder.mkdir(exist_ok=True)
    path, footprint = folder / f"{name}.{kind}", graph.footprint(BATCH)
    path.write_bytes(graph.data)
    block = block_size()
    form = blocked(graph.data, block, BATCH) if runtime == "onnx" and block else None
    if form is not None and block is not None:
        path.with_name(form_file(path.name, blocked_form(block))).write_bytes(form)
        sized = SizedGraph(graph.data, BATCH)
        footprint = sized.footprint(way_to_rewrite(sized, block))
    fed = arrays(case, submodel, chosen.inputs) | {"in place": np.array(graph.in_place, str)}
    np.savez(path.with_suffix(".npz"), **fed)  # type: ignore[arg-type]
    return path, footprint


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--case", action="append", choices=[*CASES, *PERSONAL])
    options.add_argument("--runtime", action="append", choices=RUNTIMES)
    options.add_argument("--alive", type=int, default=0, help="list N tensors of the planned peak")
    options.add_argument("--recompute", action="store_true", help="try the option recompute")
    chosen = options.parse_args()
    if chosen.recompute:
        print("| MB, batch 32 | in | no |", end="")
        print(*(f" {word} | off | left | time | over PyTorch |" for word in WORDS[1:]), sep="")
        print("|---|---|---|" + "---|" * 5 * len(WORDS[1:]))
        for name in chosen.case or CASES:
            for form in FORMS:
                report_recomputed(name, form)
        return
    print("| MB, batch 32 | in | planned | arena | predicted peak | peak | off | PyTorch | ratio |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in chosen.case or [*CASES, *PERSONAL]:
        for runtime in chosen.runtime or RUNTIMES:
            report(name, runtime, chosen.alive)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
