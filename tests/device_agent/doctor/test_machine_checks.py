"""The doctor's checks of the state folder, the machine and its libraries."""

import os
import re
import sys
from pathlib import Path

import numpy as np
import onnx.checker
import onnx.reference
import pytest

from commands import ROOT, run
from device_agent.doctor import library_checks, machine_checks
from device_agent.doctor.doctor import lines, run_checks
from device_agent.doctor.finding import Finding
from other_servers import page

LIBSTDCXX = "libstdc++.so.6: cannot open shared object file: No such file or directory"
CRASH = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


def finding_of(check: str, state: Path) -> Finding:
    return next(finding for finding in run_checks(None, state) if finding.check == check)


def test_the_tiny_graph_is_valid() -> None:
    model = onnx.load_from_string(library_checks.TINY_GRAPH)
    onnx.checker.check_model(model, full_check=True)
    evaluator = onnx.reference.ReferenceEvaluator(model)
    assert evaluator.run(None, {"x": np.array([21], np.float32)})[0] == [42]


def test_a_key_that_others_can_read(state: Path) -> None:
    (state / "device.key").write_bytes(b"k")
    (state / "device.key").chmod(0o644)
    assert finding_of("state", state).remedy == f"chmod 600 {state}/device.key"


def test_a_damaged_state(state: Path) -> None:
    (state / "device.json").write_bytes(b"{")
    assert finding_of("state", state).result == "FAIL"


def test_a_state_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for state in (tmp_path / "file", tmp_path / "file" / "below"):
        findings = [finding for finding in run_checks(None, state) if finding.check == "state"]
        assert [(f.result, f.detail) for f in findings] == [("FAIL", f"{tmp_path}/file is a file")]


def test_a_full_disk_a_small_machine_and_a_broken_runtime(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_checks, "LEAST_DISK", 1 << 60)
    monkeypatch.setattr(machine_checks, "LEAST_MEMORY", 1 << 60)
    monkeypatch.setattr(library_checks, "RUN_TINY", "import os; os.abort()")
    assert finding_of("disk", state).result == "FAIL"
    assert finding_of("memory", state).result == "FAIL"
    broken = finding_of("onnxruntime", state)
    assert broken.detail == "running a graph ended with exit code -6: no output"
    assert lines(broken) == [
        "FAIL  onnxruntime  running a graph ended with exit code -6: no output",
        "                   -> reinstall it: pip install --force-reinstall onnxruntime",
    ]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_state_folder_of_another_user(state: Path) -> None:
    state.chmod(0o555)
    assert finding_of("state", state).result == "FAIL"


def hide(folder: Path, library: str, content: str = f"raise ImportError({LIBSTDCXX!r})") -> str:
    """Put a broken `library` into `folder`. Returns a PYTHONPATH that finds it first."""
    (folder / library).mkdir()
    (folder / library / "__init__.py").write_text(content)
    return f"{folder}:{ROOT}"


def forget_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the libraries be loaded again, which a process that has them does not do."""
    for module in library_checks.LIBRARIES.values():
        monkeypatch.delitem(sys.modules, module, raising=False)


@pytest.mark.parametrize("library", list(library_checks.LIBRARIES))
def test_a_library_that_does_not_load_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    monkeypatch.setattr(library_checks, "RUN_TINY", "print('1 2.0')")
    forget_libraries(monkeypatch)
    monkeypatch.setenv("PYTHONPATH", hide(tmp_path, library))
    checks = {finding.check: finding for finding in library_checks.check_libraries()}
    assert (checks[library].result, checks["libraries"].result) == ("FAIL", "PASS")
    assert checks[library].remedy == (
        "install the system library libstdc++.so.6; on Debian: sudo apt install libstdc++6"
    )
    assert "libstdc++.so.6: cannot open" in checks[library].detail
    assert library not in checks["libraries"].detail


def test_a_version_that_was_not_verified_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, said in (("1.31.1", "1.31.1 runs graphs"), ("1.25.0", "verified with 1.19.2, ")):
        monkeypatch.setattr(library_checks, "RUN_TINY", f"print('{version} 2.0')")
        checks = {finding.check: finding for finding in library_checks.check_libraries()}
        assert checks["onnxruntime"].result == "PASS"
        assert said in checks["onnxruntime"].detail


def test_a_library_that_ends_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_libraries(monkeypatch)
    monkeypatch.setenv("PYTHONPATH", hide(tmp_path, "safetensors", CRASH))
    checks = {finding.check: finding for finding in library_checks.check_libraries()}
    assert checks["safetensors"].detail == "loading it ended with exit code -4: no output"
    assert checks["onnxruntime"].result == "PASS"


@pytest.mark.parametrize("library", ["numpy", "cryptography", "msgspec", "urllib3"])
def test_the_doctor_works_where_a_library_does_not_load(tmp_path: Path, library: str) -> None:
    hide(tmp_path, "ai_edge_litert")  # it takes long to load
    (tmp_path / "token").write_text("guess")
    with page(body=b'{"code": "client.not-authorised", "message": "Who?"}') as port:
        done = run(
            "edgetailor-agent", "doctor", f"http://127.0.0.1:{port}", "--state", "s",
            "--token-file", "token", cwd=tmp_path, PYTHONPATH=hide(tmp_path, library),
        )  # fmt: skip
    assert (done.code, done.stderr) == (2, "")
    results = re.findall("^(PASS|SKIP|FAIL)  ([^ ]+) ", done.stdout, re.M)
    assert ("FAIL", library) in results
    checks = {check for _, check in results}
    assert {"coordinator", "state", "disk", "libraries", "memory", "temperature", "power"} <= checks
    if library not in ("msgspec", "urllib3"):  # these two speak with the coordinator
        assert {"clock", "token"} <= checks


def test_a_check_that_raises_is_a_line_and_the_others_go_on(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: object) -> None:
        raise RuntimeError("nobody foresaw\nthis")

    for name in ("_writable", "_disk", "check_libraries", "check_litert", "_memory"):
        monkeypatch.setattr(machine_checks, name, fails)
    monkeypatch.setattr("device_agent.system.sensors.temperature_c", fails)
    monkeypatch.setattr("device_agent.system.sensors.charging", fails)
    monkeypatch.setattr("device_agent.federation.identity.state_folder.StateFolder.identity", fails)
    findings = list(run_checks(None, state))
    assert [finding.check for finding in findings] == [
        "coordinator", "state", "disk", "libraries", "litert", "memory", "temperature", "power",
    ]  # fmt: skip
    assert {(finding.result, finding.detail) for finding in findings} == {
        ("FAIL", "cannot be checked: RuntimeError: nobody foresaw this")
    }
