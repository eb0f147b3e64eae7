"""The same federation by EdgeTailor's agents, by Flower and by NVFLARE with PyTorch.

Eight clients as processes on this machine train the same model on the same data with the same
settings, from the same weights. `run` prints what clients need and how good the model is; peers
take turns, medians. `faults` kills a client, then a server, with SIGKILL in mid-round. `alone`
measures environments, imports and trainings without a federation. Linux only.

    python tests/benchmarks/bench_peers.py alone | run | faults [--model M] [--runs N] [--peer P]
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from peers.alone import print_alone
from peers.compared_systems import PEERS, Federation
from peers.problem import CLIENTS, PROBLEMS, Problem
from peers.processes import Watched, memory, processor_s, until

SETTLE_S, IDLE_S, AFTER_KILL_S, FAULT_ROUNDS = 10.0, 20.0, 180.0, 3
COLUMNS = {
    "idle, MB": 1e6,
    "peak, MB": 1e6,
    "processor, s: first round": 1,
    "each further round": 1,
    "server, s": 1,
    "mean round up, kB": 1e3,
    "down, kB": 1e3,
    "idle, kB/min": 1e3,
    "idle, processor ms/min: client": 1e-3,
    "server": 1e-3,
    "accuracy": 1e-2,
    "rounds took, s": 1,
}


@contextmanager
def started(name: str, problem: Problem, rounds: int) -> Iterator[Federation]:
    """A federation whose clients idle."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        problem.write(folder)
        federation = PEERS[name](folder, CLIENTS, rounds)
        with federation.processes:
            federation.start()
            yield federation
        federation.wire.close()


def measured(name: str, problem: Problem) -> list[float]:
    """The columns of one run."""
    with started(name, problem, problem.rounds) as federation:
        running, wire = federation.processes.running, federation.wire
        client, server = running["site-1"].pid, running["server"].pid

        def now() -> list[float]:
            return [processor_s(client), processor_s(server), wire.up, wire.down, time.monotonic()]

        time.sleep(SETTLE_S)
        before, resting = now(), memory(client)
        time.sleep(IDLE_S)
        idle = [(a - b) * 60 / IDLE_S for a, b in zip(now(), before, strict=True)]
        watched, begun = Watched(client), now()
        federation.begin()
        until(lambda: federation.done() >= 1, "the first round is over")
        first = now()
        until(lambda: federation.result() is not None, "all rounds are over")
        end = now()
        peak, result = watched.end(), federation.result()
        assert result is not None
        accuracy = problem.accuracy(federation.folder, result)
    start = [a - b for a, b in zip(first, begun, strict=True)]
    later = [(a - b) / (problem.rounds - 1) for a, b in zip(end, first, strict=True)]
    idling = CLIENTS - 1 if name == "EdgeTailor" else CLIENTS
    traffic = [(end[n] - begun[n]) / problem.rounds / CLIENTS for n in (2, 3)]
    return [
        *(resting, peak, start[0], later[0], later[1], *traffic),
        *((idle[2] + idle[3]) / idling, idle[0], idle[1] / idling),
        *(accuracy, end[4] - begun[4]),
    ]


def print_runs(names: list[str], problem: Problem, runs: int) -> None:
    rows: dict[str, list[list[float]]] = {name: [] for name in names}
    for _ in range(runs):
        for name in names:
            rows[name].append(measured(name, problem))
            print(name, [round(value, 3) for value in rows[name][-1]], flush=True)
    print(f"| | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}")
    for name, values in rows.items():
        medians = map(statistics.median, zip(*values, strict=True))
        cells = [
            f"{value / unit:.4g}" for value, unit in zip(medians, COLUMNS.values(), strict=True)
        ]
        print(f"| {name} | {' | '.join(cells)} |")


def print_faults(name: str, problem: Problem) -> None:
    """Kill a client, and in another federation the server, in the second round."""
    for victim in ("site-1", "server"):
        with started(name, problem, FAULT_ROUNDS) as federation:
            federation.begin()
            until(lambda: federation.done() >= 1, "a round is over")
            federation.processes.kill(victim)
            killed, before = time.monotonic(), federation.done()
            if victim == "server":
                federation.start_server()
            else:
                federation.start_client(1)
            said = f"{name}: {victim} killed in round {before + 1}, started again at once"
            try:
                until(lambda: federation.result() is not None, "it is over", AFTER_KILL_S)
            except TimeoutError:
                said += f"; after {AFTER_KILL_S:.0f} s {federation.done()} rounds were over"
            result = federation.result()
            if result is not None:
                accuracy = problem.accuracy(federation.folder, result)
                took = time.monotonic() - killed
                said += f"; all {federation.done()} rounds over {took:.0f} s later, {accuracy:.1%}"
            print(said, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["alone", "run", "faults"])
    parser.add_argument("--model", choices=list(PROBLEMS), default="digits_cnn")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--peer", choices=list(PEERS), action="append")
    given = parser.parse_args()
    names, problem = given.peer or list(PEERS), PROBLEMS[given.model]
    print(f"{given.what}, {given.model}, load {os.getloadavg()[0]:.1f}", flush=True)
    if given.what == "alone":
        print_alone(problem)
    elif given.what == "run":
        print_runs(names, problem, given.runs)
    else:
        for name in names:
            print_faults(name, problem)


if __name__ == "__main__":
    main()
