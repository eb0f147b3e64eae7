"""The demo ends all of its processes and names the one that failed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from refusals import refused
from toolkit.demo import demo_settings
from toolkit.demo.child_processes import NICENESS, Processes
from toolkit.demo.run_demo import run_demo
from vector_fleet import assert_soon

ROOT = Path(__file__).resolve().parents[3]
WATCHING = """
import sys, time
from pathlib import Path
from toolkit.demo.child_processes import Processes, interruptible
with interruptible(), Processes(Path(sys.argv[1])) as processes:
    processes.start("sleeper", "sleeper", [sys.argv[1]])
    print("started", flush=True)
    processes.pause(60)
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of modules that children can run, and of their logs."""
    (tmp_path / "sleeper.py").write_text("import time\ntime.sleep(60)\n")
    (tmp_path / "dying.py").write_text("print('starting')\nraise SystemExit('disk on fire')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    return tmp_path


def test_a_dying_child_ends_the_others_and_is_named(modules: Path) -> None:
    log = modules / "phone-1.log"
    with Processes(modules) as processes:
        sleeper = processes.start("sleeper", "sleeper", [])
        processes.start("phone-1", "dying", [])
        with refused("demo.process-failed", process="phone-1", exit_code=1, log=str(log)) as caught:
            processes.pause(60)
    assert not sleeper.running
    assert str(caught.value).endswith(f"{log}: disk on fire")
    assert "\n" not in str(caught.value)


def test_a_killed_child_is_named_with_its_signal(modules: Path) -> None:
    with Processes(modules) as processes:
        processes.start("phone-1", "sleeper", []).process.kill()
        with refused("demo.process-failed", process="phone-1", exit_code=-9) as caught:
            processes.pause(60)
    assert "(SIGKILL)" in str(caught.value)


def test_a_child_that_does_not_end_in_time_is_an_error(modules: Path) -> None:
    with Processes(modules) as processes:
        sleeper = processes.start("phone-1", "sleeper", [])
        with refused("demo.process-timeout", process="phone-1", limit_s=1):
            processes.finish([sleeper], 1)


def test_background_children_let_the_others_go_first(modules: Path) -> None:
    with Processes(modules) as processes:
        usual, last = (
            os.getpriority(os.PRIO_PROCESS, processes.start("a", "sleeper", [], **how).process.pid)
            for how in ({}, {"background": True})
        )
    assert last == min(usual + NICENESS, 19)
    assert usual == os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("number", "ended_by"),
    [(signal.SIGTERM, signal.SIGINT), (signal.SIGKILL, signal.SIGKILL)],  # SIGTERM interrupts
)
def test_children_end_with_their_parent(
    modules: Path, number: signal.Signals, ended_by: signal.Signals
) -> None:
    command = [sys.executable, "-c", WATCHING, str(modules)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"started\n"
    assert any("sleeper" in line for line in command_lines_with(modules))
    parent.send_signal(number)
    parent.communicate(timeout=20)
    assert parent.returncode == -ended_by
    assert_soon(lambda: not command_lines_with(modules))


def test_a_coordinator_that_fails_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_settings, "MODEL", "nowhere:nothing")
    out = tmp_path / "demo"
    log = out / "logs" / "coordinator.log"
    with refused("demo.process-failed", process="coordinator", exit_code=2, log=str(log)) as caught:
        run_demo(out, rounds=1, seed=0, all_full=True, force=False)
    assert "Cannot import nowhere" in str(caught.value)
    assert log.exists()


def command_lines_with(folder: Path) -> list[str]:
    """Command lines of running processes that name `folder`, this one's apart."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue  # it has ended
            if str(folder) in line:
                found.append(line)
    return found


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_demo_trains_a_fleet_and_leaves_no_process(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    command = [sys.executable, "-m", "toolkit.cli", "demo", "--rounds", "2", "--out", str(out)]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document == json.loads((out / "report.json").read_text())
    names = [member.name for member in demo_settings.members(demo_settings.FLEET)]
    assert [entry["device"] for entry in document["devices"]] == names
    assert len(document["history"]) == 3
    assert len(document["baselines"]["all_full"]) == 3
    assert document["baselines"]["alone"].keys() == set(names)
    assert min(document["larger_model"]["training_above_idle_bytes"].values()) > 1_000_000
    assert all(min(e["bytes_down"], e["bytes_up"]) > 50_000 for e in document["devices"])
    assert all(e["forward_s"] > 0 and e["params"] > 0 for e in document["devices"])
    assert "Round 2 of 2: accuracy" in done.stderr
    for name in ("accuracy.png", "global.safetensors", "data/held-out.npz", "logs/phone-1.log"):
        assert (out / name).stat().st_size > 0, name
    for kind in demo_settings.FLEET:
        assert (out / "bundles" / kind.name / "manifest.json").exists()
    assert not command_lines_with(out)
