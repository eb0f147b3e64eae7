"""Checks the profiler against known allocations, run counts and throttling."""

import json
import os
import statistics
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from bundles import BundleOf
from commands import run_code
from device_agent.formats.bundle import open_bundle, structure, training_of
from device_agent.profiling.measure_messages import Task, tasks
from device_agent.profiling.measure_process import make_action, prepare_run
from device_agent.profiling.profiler import profile_bundle, require_stable
from device_agent.profiling.sustained_run import summarise
from device_agent.runtime.runtime_choice import Session
from log_messages import logged
from made_profiles import full
from profiles.documents.bundle_profile import Profile, Validity
from profiles.documents.timing_statistics import duration
from profiles.errors import UnstableError
from refusals import refused

MB = 10**6

# Prints the peak above the idle process and the growth of its pages after a known allocation.
ALLOCATE = """
import json, mmap, resource, sys
from device_agent.system import process_memory as memory

size, path = int(sys.argv[1]), sys.argv[2]
memory.reset_peak()
idle = memory.pages()
block = bytearray(size)
block[::4096] = b"x" * len(block[::4096])
del block
with open(path, "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    mapped[::4096]
    held = memory.pages()
print(json.dumps([
    memory.peak_bytes() - idle.anonymous_bytes - idle.file_bytes,
    held.anonymous_bytes - idle.anonymous_bytes,
    held.file_bytes - idle.file_bytes,
    resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
]))
"""


def test_the_memory_of_a_child_with_a_known_allocation(tmp_path: Path) -> None:
    """The parent is larger than the child. getrusage would report the parent's peak."""
    (tmp_path / "file").write_bytes(b"x" * 30 * MB)
    large = bytearray(600 * MB)
    large[::4096] = b"x" * len(large[::4096])
    done = run_code(ALLOCATE, 90 * MB, tmp_path / "file").succeeded()
    peak, anonymous, file, inherited = json.loads(done.stdout)
    # The kernel counts pages in batches of a few hundred kB per processor.
    assert abs(peak - 90 * MB) < 2 * MB
    assert abs(anonymous) < 2 * MB
    assert abs(file - 30 * MB) < 2 * MB
    assert inherited > len(large)


def test_percentiles() -> None:
    seconds = np.random.default_rng(0).exponential(size=21).tolist()
    summary = duration(seconds)
    tenths = statistics.quantiles(seconds, n=10, method="inclusive")
    assert summary.median_s == statistics.median(seconds)
    assert (summary.p10_s, summary.p90_s) == pytest.approx((tenths[0], tenths[-1]))
    assert summary.runs == 21


def test_a_sustained_run_on_a_device_that_slows_down() -> None:
    """Five minutes. Steps take 0.1 s at first, and 1% of that more in every later second."""
    at = np.arange(0, 300, 0.5)
    took = 0.1 * (1 + np.floor(at) / 100)
    read = {number: (40.0 + number, 10**9) for number in range(60)}
    run = summarise(at, took, 5.0, read)
    assert run.window_s == 60
    assert run.first.median_s == pytest.approx(0.1 * 1.295)
    assert run.last.median_s == pytest.approx(0.1 * (1 + 2.695))
    assert run.slowdown == pytest.approx(3.695 / 1.295 - 1, rel=0.01)
    assert [point.at_s for point in run.points] == [5.0 * number for number in range(60)]
    assert run.points[1].step.median_s == pytest.approx(0.1 * 1.07)
    assert {point.step.runs for point in run.points} == {10}
    short = summarise(np.array([0.0, 1.0]), np.array([1.0, 2.0]), 1.0, {0: (None, None)})
    assert (short.window_s, short.first.median_s, short.last.median_s) == (1.5, 1.5, 2.0)


# What is measured


class Counting:
    """A session that counts its runs."""

    def __init__(self, session: Session) -> None:
        self.session, self.runs = session, 0

    def run(self, *given: Mapping[str, Any]) -> dict[str, np.ndarray]:
        self.runs += 1
        return self.session.run(*given)


def counted(bundle: Path, task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often each signature of `task` runs if the task is repeated once."""
    sessions: list[Counting] = []
    opened = open_bundle(bundle)
    run = prepare_run(opened, task, tmp_path, 1)
    plain = run.open

    def opening(name: str) -> Counting:
        sessions.append(Counting(plain(name)))
        return sessions[-1]

    monkeypatch.setattr(run, "open", opening)
    action = make_action(task, run)
    action()
    action()
    return [session.runs for session in sessions]


def test_a_training_step_of_several_signatures(
    bundle_of: BundleOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = open_bundle(bundle_of("cp"))
    times = [step.times for step in training_of(bundle).steps]
    assert len(times) == 2
    listed = tasks(bundle)
    roles = [task.role for task in listed]
    assert roles == ["initialise", "forward", "step", "step", "train", "evaluate"]
    for task, expected in zip(
        listed, [[2], [2], [2], [2], [2 * n for n in times], [2]], strict=True
    ):
        assert counted(bundle.folder, task, tmp_path, monkeypatch) == expected


def test_a_slice_gets_a_synthetic_recording(
    bundle_of: BundleOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = open_bundle(bundle_of("slice"))
    listed = tasks(bundle)
    assert [task.role for task in listed[-3:]] == ["forward", "train", "evaluate"]
    assert {task.role for task in listed[:-3]} == {"stage"}
    for task in listed:
        assert counted(bundle.folder, task, tmp_path, monkeypatch) == [2]


def test_steps_that_are_timed_keep_the_weights(bundle_of: BundleOf, tmp_path: Path) -> None:
    bundle = open_bundle(bundle_of("full"))
    task = Task(role="train", signatures=("train",))
    run = prepare_run(bundle, task, tmp_path, 1)
    action = make_action(task, run)
    first = {name: array.copy() for name, array in run.state.items()}
    action()
    action()
    parameters = {e.name for e in bundle.manifest.tensors if e.role == "parameter"}
    assert all(np.array_equal(first[name], run.state[name]) for name in parameters)
    # The gradients are computed and go into the momentum.
    assert any(not np.array_equal(first[name], run.state[name]) for name in first)


def test_submodels_differ_in_their_structure(bundle_of: BundleOf) -> None:
    manifests = [open_bundle(bundle_of(name)).manifest for name in ("full", "cp", "slice")]
    assert len({structure(manifest) for manifest in manifests}) == 3


# Throttling


def pi(root: Path, flags: str) -> Path:
    """Write the throttling flags of a Raspberry Pi into a sysfs folder."""
    path = root / "devices/platform/soc/soc:firmware/get_throttled"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{flags}\n")
    return root


def children() -> set[str]:
    """The processes that this one has started, such as the server that others are forked from."""
    main = threading.main_thread().native_id
    return set(Path(f"/proc/{os.getpid()}/task/{main}/children").read_text().split())


def once_a_child_runs(root: Path, flags: str, known: set[str]) -> None:
    """Set the flags once this process has a new child, which is after the first sensor reading."""
    while not children() - known:
        time.sleep(0.001)
    pi(root, flags)


def profiled(bundle: Path, root: Path, flags: str) -> Profile:
    """Profile a bundle, and set the throttling flags to `flags` during the training step."""

    class Starter(list[str]):
        def append(self, line: str) -> None:
            if line == "Measuring train":
                known = children()
                threading.Thread(target=once_a_child_runs, args=(root, flags, known)).start()

    with logged(messages=Starter()):
        return profile_bundle(bundle, 1, runs=5, sysfs=root)


@pytest.mark.parametrize(("flags", "reason"), [("4", "throttled"), ("10000", "under-voltage")])
def test_a_run_with_throttling_is_invalid(
    bundle_of: BundleOf, tmp_path: Path, flags: str, reason: str
) -> None:
    profile = profiled(bundle_of("full"), pi(tmp_path, "0"), flags)
    assert profile.before.throttled == ()
    assert f"{reason} during train" in profile.validity.invalid
    assert f"{reason} during predict" not in profile.validity.invalid
    with refused("measurement.throttled") as error:
        require_stable(profile)
    assert isinstance(error.value, UnstableError)
    assert f"{reason} during train" in error.value.values["reasons"]


def test_throttling_before_the_run_does_not_count(bundle_of: BundleOf, tmp_path: Path) -> None:
    profile = profiled(bundle_of("full"), pi(tmp_path, "50000"), "50000")
    assert profile.validity.invalid == ()


def test_strict_refuses_unstable_times() -> None:
    require_stable(full())
    varying = Validity(unstable=("predict", "train"))
    unstable = msgspec.structs.replace(full(), validity=varying)
    with refused(
        "measurement.unstable", phases=["forward pass", "training step"], spread=0.26
    ) as error:
        require_stable(unstable)
    assert isinstance(error.value, UnstableError)
    assert UnstableError.exit_code == 7
