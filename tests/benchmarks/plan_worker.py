"""Child process of `bench_plan.py`: trains one submodel's graphs on one thread, on request.

`python plan_worker.py FOLDER SIGNATURE*TIMES...` answers on standard output, one JSON value a
line: first the bytes that steps take above the idle agent, then for every line that it reads the
processor seconds of one batch.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

import device_agent.training.bundle_training  # noqa: F401 - the agent as it is before a bundle is opened
from device_agent.runtime.blocked_probe import best_form
from device_agent.runtime.runtime_choice import open_session
from device_agent.system import process_memory

WARM_UP = 3


def main(folder: Path, steps: dict[str, int]) -> None:
    process_memory.map_large_blocks()  # as training does
    idle = process_memory.resident_bytes()
    state = dict(np.load(folder / "state.npz"))
    graphs = {name: best_form(folder / f"{name}.onnx") for name in steps}
    sessions = {name: open_session("onnx", graph, name, 1) for name, graph in graphs.items()}
    about = {name: json.loads((folder / f"{name}.json").read_text()) for name in steps}

    def batch() -> None:
        for name, times in steps.items():
            ports, over = about[name]
            for _ in range(times):
                results = sessions[name].run({port: state[port] for port in ports}, over)
                state.update({n.removesuffix("+"): v for n, v in results.items() if n[-1] == "+"})

    # Three before the peak counts, as in bench-memory: the first reads the graph.
    for _ in range(WARM_UP):
        batch()
    process_memory.reset_peak()
    for _ in range(WARM_UP):
        batch()
    print(json.dumps((process_memory.peak_bytes() or 0) - (idle or 0)), flush=True)
    for _ in sys.stdin:
        start = time.process_time()
        batch()
        print(json.dumps(time.process_time() - start), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), {n: int(t) for n, t in (a.split("*") for a in sys.argv[2:])})
