"""The calibration, run for a short time on this machine: its timings and the device profile."""

import datetime
import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from commands import ROOT, Agent, run_code
from device_agent.profiling import calibration, operation_timing
from device_agent.profiling.calibrate_speed_process import calibrate_speed
from device_agent.profiling.calibration import (
    calibrate,
    device_profile,
    measure_memory,
    measured_device,
)
from device_agent.profiling.calibration_cases import MAX_MACS, Shape, all_cases
from device_agent.profiling.calibration_summary import rates, summary
from device_agent.profiling.case_order import spread
from device_agent.profiling.operation_timing import (
    RUNS,
    fastest_mean,
    subtract_profiler,
    time_cases,
)
from device_agent.profiling.time_budget import Budget
from device_agent.runtime.blocked_probe import block_size
from log_messages import logged
from profiles.cost_model.prediction import TIMED, TimeModel
from profiles.cost_model.workload import BLOCKED, KINDS, Operation, amount
from profiles.documents.bundle_profile import Pages
from profiles.documents.calibration_record import Calibration, Timing
from profiles.documents.device_profile import load_device
from refusals import refused

LARGEST = 160e6
"""Multiply-accumulates: a tenth of a second on a core that does 1.6 G per second."""


def ticking(step_s: float) -> Callable[[], float]:
    """A clock that advances whenever it is read, so that the number of runs is always the same."""
    ticks = itertools.count()
    return lambda: next(ticks) * step_s


@pytest.fixture(scope="module")
def found() -> Calibration:
    whole = calibrate_speed(1, Budget(10_000.0, ticking(2.5)), print)
    return msgspec.structs.replace(whole, memory=measure_memory())


def test_every_kind_of_work_is_timed(found: Calibration) -> None:
    own = Counter(timing.kind for timing in found.timings)
    untimed = {"view", "loop"}
    assert own.keys() >= {*KINDS.values()} - untimed
    assert own.keys().isdisjoint(BLOCKED) == (block_size() is None)
    assert own["convolution"] > 50
    assert all(timing.seconds > 0 for timing in found.timings)
    assert (found.threads, found.runtime.split()[0]) == (1, "onnxruntime")
    assert min(found.run_s, found.port_s, found.node_s, found.loop_step_s) >= 0
    assert found.timed_share == 1


def test_cases_are_small(found: Calibration) -> None:
    assert max(amount(t.kind, t.sizes) for t in found.timings) < LARGEST
    assert MAX_MACS < LARGEST


def test_more_work_takes_longer(found: Calibration) -> None:
    for kind in ("arithmetic", "exponential", "selection"):
        own = sorted((t.sizes, t.seconds) for t in found.timings if t.kind == kind)
        assert own[0][1] < own[-1][1]


def test_memory_is_measured_in_a_fresh_process(found: Calibration) -> None:
    assert found.memory is not None
    # Python with numpy and onnxruntime, and no torch.
    assert 20e6 < found.memory.idle_bytes < 150e6
    assert 1e6 < found.memory.session_bytes < 60e6
    assert 0 < found.memory.node_bytes < 50_000


def test_the_time_of_the_profiler_is_subtracted() -> None:
    timings = [Timing("unary", (1,), 2e-6), Timing("unary", (9,), 12e-6)]
    [small, large] = subtract_profiler(timings, 3e-7)
    assert small.seconds == pytest.approx(3e-7)
    assert large.seconds == pytest.approx(10e-6 + 3e-7)


def test_no_operation_takes_zero_time() -> None:
    same = [Timing("unary", (1,), 5e-6), Timing("unary", (2,), 5e-6)]
    assert [timing.seconds for timing in subtract_profiler(same, 0.0)] == [1e-9, 1e-9]


def test_the_quickest_quarter_counts() -> None:
    assert fastest_mean([9.0, 1.0, 3.0, 9.0, 9.0, 9.0, 9.0, 9.0]) == 2.0
    assert fastest_mean([5.0]) == 5.0


def test_without_time_every_case_still_runs() -> None:
    two = [("product", {"x": (1, 2, 3), "w": (1, 3, 4)}), ("row", {"x": (5,)})]
    timings = time_cases(two, 1, Budget(0.0), print)
    assert [(t.kind, t.sizes) for t in timings.timings] == [
        ("product", (1, 2, 4, 3)),
        ("unary", (5,)),
    ]


class SlowGraph:
    """A graph of a device on which a run takes 0.3 s."""

    now = 0.0
    ran: ClassVar[list[str]] = []

    def __init__(self, name: str, threads: int, folder: Path) -> None:
        self._name = name

    def run(self, shapes: Mapping[str, Shape], budget: Budget, share: float) -> None:
        for _ in budget.runs(RUNS, share):
            SlowGraph.now += 0.3
        self.ran.append(self._name)

    def timings(self) -> list[Timing]:
        return []


@pytest.mark.parametrize("length_s", [1.0, 45.0, 1000.0])
def test_a_slow_device_keeps_to_the_time(monkeypatch: pytest.MonkeyPatch, length_s: float) -> None:
    monkeypatch.setattr(operation_timing, "TimedGraph", SlowGraph)
    SlowGraph.now = 0.0
    SlowGraph.ran.clear()
    said: list[str] = []
    cases = list(all_cases())
    timed = time_cases(cases, 1, Budget(length_s, lambda: SlowGraph.now), said.append)
    graphs = {name for name, _ in cases}
    assert timed.share == len(SlowGraph.ran) / len(cases)
    assert all(SlowGraph.ran.count(name) >= 3 for name in graphs)  # those that rates need
    needed_s = 3 * len(graphs) * 0.3
    assert SlowGraph.now <= length_s + (needed_s if length_s < needed_s else 0) + RUNS[0] * 0.3
    assert (timed.share == 1) == (length_s == 1000.0)
    # A line after ten seconds, when a case has ended.
    assert SlowGraph.now / 16 <= len(said) <= SlowGraph.now / 10
    assert all(line.startswith("Timed ") for line in said)


def test_the_smallest_and_largest_cases_come_first() -> None:
    cases = [("row", {"x": (n,)}) for n in (5, 3, 8, 1, 9, 2, 7, 4, 6)]
    chunks = spread([*cases, ("loop", {"x": (1,)})])
    assert [(c.graph, [shapes["x"][0] for shapes in c.cases], c.needed) for c in chunks] == [
        ("row", [1, 9, 5], True),
        ("loop", [1], True),
        ("row", [3, 7, 2, 4, 6, 8], False),
    ]


def test_cases_that_need_too_much_memory_are_left_out() -> None:
    two = [("row", {"x": (1000,)}), ("row", {"x": (1001,)})]
    timed = time_cases(two, 1, Budget(1.0, ticking(0.1)), print, room=4 * 4 * 1000)
    assert ([t.sizes for t in timed.timings], timed.share) == ([(1000,)], 0.5)


def test_memory_is_measured_before_the_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: Calibration
) -> None:
    available = [322_000_000]

    def calibrating(threads: int) -> Calibration:
        available[0] = 145_000_000
        return found

    monkeypatch.setattr(calibration.process_memory, "available_bytes", lambda: available[0])
    monkeypatch.setattr(
        calibration.process_memory, "pages", lambda: Pages(anonymous_bytes=7, file_bytes=9)
    )
    monkeypatch.setattr(calibration, "calibrate", calibrating)
    # What this process holds itself is free when the agent runs.
    assert measured_device("desk", tmp_path).memory_available_bytes == 322_000_007


def test_progress_and_results_of_the_child_process() -> None:
    with logged("device_agent.profiling") as said:
        timed = calibrate(1, 0.01)
    assert said[0] == "Measuring the overhead of a run, a few seconds"
    assert said[-2].endswith("Predictions of its time have wider bounds.")
    assert 0 < timed.timed_share < 0.5
    assert TimeModel(timed).rates.keys() >= TIMED


def test_a_child_process_that_dies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "onnxruntime.py").write_text("import os; os.kill(os.getpid(), 9)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    with refused("calibration.failed", "because memory ran out"):
        calibrate(1, 0.01)


def test_the_profile_of_this_device(found: Calibration, tmp_path: Path) -> None:
    device = device_profile("desk", found, tmp_path, 2**28)
    assert device.machine is not None
    assert device.memory_bytes == device.machine.memory_bytes
    assert device.sources == dict.fromkeys(
        ("cores", "memory_bytes", "memory_available_bytes", "storage_free_bytes"),
        "measured on the device",
    )
    assert msgspec.json.decode(msgspec.json.encode(device), type=type(device)) == device
    lines = summary(device, tmp_path / "desk.json")
    assert lines[0].startswith("desk: onnxruntime ")
    assert lines[-1] == (
        f"next: edgetailor plan MODEL --input-shape SHAPE --profile {tmp_path}/desk.json"
    )


def test_rates_as_text() -> None:
    timings = [Timing("product", (1, 10, 10, 10), 1e-6), Timing("product", (1, 10, 10, 20), 1e-6)]
    assert rates("product", timings) == "1 to 2 GMAC/s, 2 sizes"
    assert rates("unary", [Timing("unary", (1000,), 1e-6)]) == "1 to 1 G numbers/s, 1 sizes"


def test_an_existing_file_is_kept(agent: Agent, tmp_path: Path) -> None:
    kept = tmp_path / "device.json"
    kept.write_text("mine")
    done = agent("calibrate", "--out", kept)
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr == (
        f"Error: {kept} exists already: give another place, or --force to replace it.\n"
    )
    assert kept.read_text() == "mine"


def test_no_torch_is_needed(tmp_path: Path) -> None:
    program = (
        "import sys, json, device_agent.profiling.calibration;"
        "import device_agent.profiling.calibration_summary;"
        "import device_agent.profiling.calibrate_memory_process;"
        "import device_agent.profiling.calibrate_speed_process;"
        "print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    )
    done = run_code(program).succeeded()
    forbidden = {"torch", "onnx", "onnxscript", "exporters", "toolkit"}
    assert not forbidden & set(json.loads(done.stdout))


@pytest.mark.long
def test_the_command_writes_a_profile_that_the_planner_reads(agent: Agent, tmp_path: Path) -> None:
    out = tmp_path / "desk.json"
    done = agent("calibrate", "--threads", "1", "--name", "desk", "--out", out, "--json")
    assert done.code == 0
    said = done.stderr.splitlines()
    assert [said[0], said[-1]] == [
        "Measuring the overhead of a run, a few seconds",
        "Measuring the memory of the runtime",
    ]
    written = load_device(str(out))
    assert json.loads(done.stdout) == json.loads(out.read_bytes())
    assert (written.name, written.date) == ("desk", datetime.date.today().isoformat())
    assert written.calibration is not None
    step = TimeModel(written.calibration).seconds(Operation("product", (1, 256, 256, 256)))
    assert 0 < step < 1
