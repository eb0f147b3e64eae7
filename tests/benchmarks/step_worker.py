"""Child process of `bench_step.py`: one peer, one training step, steps on request.

`python step_worker.py PEER CASE GRAPH THREADS` (PEER pytorch, onnx, litert or ort-training) answers
on standard output, one JSON value a line: first the loss of its first step, or null where it only
predicts, then for every line that it reads: `time` the seconds of one step, `memory` the bytes that
steps take above the idle process.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

WARM_UP = 2
MEMORY_STEPS = 3

Step = Callable[[], float | None]


def status(field: str) -> int:
    """A field of this process's status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}")


def above_idle(idle: int, step: Step) -> int:
    """Bytes by which the process's peak during steps is above `idle`."""
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(MEMORY_STEPS):
        step()
    return status("VmHWM") - idle


def pytorch(case: str, threads: int) -> tuple[int, Step]:
    """PyTorch eager: its idle process and its step."""
    import torch
    from step_cases import CASES, PLAIN, eager_step

    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)  # fading gradients of an LSTM make it 15 times slower otherwise
    return status("VmRSS"), eager_step({**CASES, **PLAIN}[case])


def agent(runtime: str, graph: str, threads: int) -> tuple[int, Step]:
    """A runtime as the agent opens it, running the one signature that GRAPH is named after."""
    import numpy as np
    import numpy.random  # numpy loads it at its first use, and an idle agent has it

    from device_agent.runtime.runtime_choice import open_session
    from device_agent.system.process_memory import map_large_blocks

    map_large_blocks()  # as training does
    idle = status("VmRSS")
    path = Path(graph)
    session = open_session(runtime, path, path.stem, threads)
    feeds = dict(np.load(path.with_suffix(".npz")))
    over = {name: name.removesuffix("+") for name in feeds.pop("in place").tolist()}

    def step() -> float | None:
        results = session.run(feeds, over)
        feeds.update({n.removesuffix("+"): v for n, v in results.items() if n.endswith("+")})
        return float(results["loss"]) if "loss" in results else None

    return idle, step


def ort_training(graph: str, threads: int) -> tuple[int, Step]:
    """The retired training build, its idle process and its step."""
    from retired_step import retired

    return status("VmRSS"), retired(graph, threads)


def answer(idle: int, step: Step) -> None:
    """Serve requests until standard input ends."""
    loss = step()
    for _ in range(WARM_UP):
        step()
    print(json.dumps(loss), flush=True)
    for request in sys.stdin:
        if request.strip() == "time":
            start = time.perf_counter()
            step()
            print(json.dumps(time.perf_counter() - start), flush=True)
        else:
            print(json.dumps(above_idle(idle, step)), flush=True)


if __name__ == "__main__":
    peer, case, graph, threads = sys.argv[1:]
    if peer == "pytorch":
        answer(*pytorch(case, int(threads)))
    elif peer == "ort-training":
        answer(*ort_training(graph, int(threads)))
    else:
        answer(*agent(peer, graph, int(threads)))
