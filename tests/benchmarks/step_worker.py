"""Child process of `bench_step.py`: one peer, one training step, steps on request.

`python step_worker.py PEER CASE GRAPH THREADS WARM_UP` runs the step in GRAPH by PEER:

- onnx, litert or ort-training
- pytorch, which reads a saved step or makes that of CASE
- batches: all signatures that CASE names, of the folder GRAPH (for `bench_plan.py`)

It answers on standard output, one JSON value a line. The first is the loss of the first step, null
where it only predicts, or the code of the error by which the runtime refuses the graph. WARM_UP
steps later it answers every line that it reads: `time` and `processor` with the seconds of one
step, elapsed and of the processor, `memory` with the bytes that steps take above the idle process.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

CLOCKS = {"time": time.perf_counter, "processor": time.process_time}
MEMORY_STEPS = 3
SAVED = ".pt"
"""The end of the name of a saved step of PyTorch's."""

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


def pytorch(case: str, saved: str, threads: int, compiled: bool = False) -> tuple[int, Step]:
    """PyTorch, eager or compiled: its idle process and its step."""
    import torch
    from step_cases import CASES, PLAIN, eager, eager_step

    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)  # fading gradients of an LSTM make it 15 times slower otherwise
    idle = status("VmRSS")
    if saved.endswith(SAVED):
        return idle, eager_step(torch.load(saved, weights_only=False))
    given = eager({**CASES, **PLAIN}[case])
    if compiled:
        given = replace(given, model=torch.compile(given.model))
    return idle, eager_step(given)


def agent(runtime: str, graph: str, threads: int) -> tuple[int, Step]:
    """A runtime as the agent opens it, running the one signature that GRAPH is named after."""
    import numpy as np
    import numpy.random  # numpy loads it at its first use, and an idle agent has it

    from device_agent.runtime.blocked_probe import best_form
    from device_agent.runtime.runtime_choice import open_session
    from device_agent.system.process_memory import map_large_blocks

    map_large_blocks()  # as training does
    idle = status("VmRSS")
    path = Path(graph)
    form = best_form(path) if runtime == "onnx" else path
    session = open_session(runtime, form, path.stem, threads)
    feeds = dict(np.load(path.with_suffix(".npz")))
    over = {name: name.removesuffix("+") for name in feeds.pop("in place").tolist()}

    def step() -> float | None:
        results = session.run(feeds, over)
        feeds.update({n.removesuffix("+"): v for n, v in results.items() if n.endswith("+")})
        return float(results["loss"]) if "loss" in results else None

    return idle, step


def batches(steps: str, folder: str) -> tuple[int, Step]:
    """An agent that runs whole batches: the signatures NAME*TIMES of `steps`, in this order."""
    import numpy as np

    import device_agent.training.bundle_training  # noqa: F401 - as an idle agent has it
    from device_agent.runtime.blocked_probe import best_form
    from device_agent.runtime.runtime_choice import open_session
    from device_agent.system.process_memory import map_large_blocks

    map_large_blocks()  # as training does
    idle = status("VmRSS")
    state = dict(np.load(Path(folder, "state.npz")))
    runs = [(name, int(times)) for name, times in (step.split("*") for step in steps.split())]
    graphs = {name: best_form(Path(folder, f"{name}.onnx")) for name, _ in runs}
    sessions = {name: open_session("onnx", graph, name, 1) for name, graph in graphs.items()}
    about = {name: json.loads(Path(folder, f"{name}.json").read_text()) for name, _ in runs}

    def batch() -> None:
        for name, times in runs:
            ports, over = about[name]
            for _ in range(times):
                results = sessions[name].run({port: state[port] for port in ports}, over)
                state.update({n.removesuffix("+"): v for n, v in results.items() if n[-1] == "+"})

    return idle, batch


def ort_training(graph: str, threads: int) -> tuple[int, Step]:
    """The retired training build, its idle process and its step."""
    from retired_step import retired

    return status("VmRSS"), retired(graph, threads)


def answer(idle: int, step: Step, warm_up: int) -> None:
    """Serve requests until standard input ends."""
    loss = step()
    for _ in range(warm_up):
        step()
    print(json.dumps(loss), flush=True)
    for request in sys.stdin:
        if clock := CLOCKS.get(request.strip()):
            start = clock()
            step()
            print(json.dumps(clock() - start), flush=True)
        else:
            print(json.dumps(above_idle(idle, step)), flush=True)


def agent_or_refusal(runtime: str, graph: str, threads: int) -> tuple[int, Step]:
    """`agent`; if the runtime refuses the graph, say so and end this process."""
    from profiles.errors import BundleError

    try:
        return agent(runtime, graph, threads)
    except BundleError as error:
        print(json.dumps(error.code), flush=True)
        sys.exit()


if __name__ == "__main__":
    peer, case, graph, threads, warm_up = sys.argv[1:]
    if peer in ("pytorch", "torch.compile"):
        opened = pytorch(case, graph, int(threads), compiled=peer != "pytorch")
    elif peer == "batches":
        opened = batches(case, graph)
    elif peer == "ort-training":
        opened = ort_training(graph, int(threads))
    else:
        opened = agent_or_refusal(peer, graph, int(threads))
    answer(*opened, int(warm_up))
