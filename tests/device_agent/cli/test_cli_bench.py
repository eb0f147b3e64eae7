"""`edgetailor-agent bench`: one table of several bundles."""

import json
import platform
import re
import shutil
from pathlib import Path

import msgspec
import onnxruntime
import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from bundles import BATCH, FAMILIES, BundleOf, everything
from commands import Agent, refusal
from device_agent.cli.bench_command import bench
from device_agent.profiling import bundle_benchmark, calibration
from device_agent.profiling.bundle_benchmark import BenchRow, bench_profile
from device_agent.runtime.runtime_choice import alternatives
from made_calibration import CALIBRATION
from made_profiles import MACHINE, full
from profiles.documents.bundle_profile import Profile, this_machine
from profiles.documents.device_profile import load_device
from profiles.errors import BundleError

SECONDS = r"\d+\.\d{4}"


@pytest.mark.long
def test_a_folder_of_bundles(agent: Agent, bundle_of: BundleOf, tmp_path: Path) -> None:
    for family in ("slice", "full"):
        shutil.copytree(bundle_of(family), tmp_path / "fleet" / family)
    (tmp_path / "fleet" / "notes").mkdir()
    before = everything(tmp_path)
    done = agent("bench", "fleet", bundle_of("low-rank"), "--threads", "1")
    assert (done.code, done.stderr) == (0, "")
    last = bundle_of("low-rank").name
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"bundle +submodel +batch +runtime +s/batch +spread +peak MB", lines[0])
    runtimes = ["onnxruntime", *alternatives("onnx")]
    expected = [
        rf"{name} +{FAMILIES[family]} +{BATCH} +{runtime} +{SECONDS} +\d+% +\d+\.\d"
        for name, family in (("full", "full"), ("slice", "slice"), (last, "low-rank"))
        for runtime in runtimes
    ]
    for line, form in zip(lines[1 : 1 + len(expected)], expected, strict=True):
        assert re.fullmatch(form, line)
    *_, versions, place = lines[1 + len(expected) :]
    assert re.fullmatch(rf"onnxruntime {onnxruntime.__version__}.*; threads 1", versions)
    assert re.fullmatch(r"on .+", place)
    assert everything(tmp_path) == before


def test_a_damaged_bundle_does_not_end_the_others(
    agent: Agent, bundle_of: BundleOf, tmp_path: Path
) -> None:
    shutil.copytree(bundle_of("full"), tmp_path / "fleet" / "whole")
    shutil.copytree(bundle_of("full"), tmp_path / "fleet" / "broken")
    (tmp_path / "fleet" / "broken" / "train.onnx").write_bytes(b"")
    done = agent("bench", "fleet", "--json", "--runtime", "onnxruntime")
    assert done.code == 2
    broken, whole = json.loads(done.stdout)["bundles"]
    assert (broken["name"], broken["seconds_per_batch"]) == ("broken", None)
    assert broken["code"].startswith("bundle.")
    assert "train.onnx" in broken["error"]
    assert (whole["name"], whole["submodel"], whole["error"]) == ("whole", "full", None)
    assert whole["runtime"].startswith("onnxruntime 1.")
    assert whole["batch_size"] == BATCH
    assert 0 < whole["seconds_per_batch"] < 60
    assert whole["peak_bytes"] > 10**6


def test_a_place_without_bundles_is_refused(agent: Agent, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = agent("bench", "empty")
    assert refusal(done).startswith("empty is no bundle and has no bundles in it. Give a folder")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Every bundle takes 0.4 s with its own runtime and 0.3 s with OpenVINO, which is installed.

    The list has the runtimes that were asked for.
    """
    asked: list[str | None] = []

    def profile(folder: Path, threads: int, *, runs: int, runtime: str | None) -> Profile:
        asked.append(runtime)
        if runtime != "openvino":
            return full()
        return replace(full(0.75), machine=replace(MACHINE, runtime="openvino 2026.4.1"))

    monkeypatch.setattr(bundle_benchmark, "profile_bundle", profile)
    monkeypatch.setattr(bundle_benchmark, "alternatives", lambda runtime: ("openvino",))
    monkeypatch.setattr(calibration, "calibrate", lambda threads: CALIBRATION)
    return asked


def measured(*arguments: object) -> Result:
    return CliRunner().invoke(bench, list(map(str, arguments)))


def test_a_line_for_each_runtime(made: list[str | None], bundle_of: BundleOf) -> None:
    done = measured(bundle_of("full"))
    assert (done.exit_code, made) == (0, [None, "openvino"])
    _, own, other, *legend = done.stdout.splitlines()
    assert own.split()[3:] == ["onnxruntime", "0.4000", "10%", "120.0"]
    assert other.split()[3:] == ["openvino", "0.3000", "10%", "105.0"]
    assert legend == [
        "s/batch: median of 20 training steps; spread: p10 to p90, relative to it",
        "peak MB: the whole process that trains, with Python and the runtime",
        "onnxruntime 1.31.1, openvino 2026.4.1; threads 1",
        f"on {MACHINE.model}",
    ]
    made.clear()
    done = measured(bundle_of("full"), "--runtime", "onnxruntime")
    assert (len(done.stdout.splitlines()), made) == (2 + len(legend), ["onnxruntime"])


@pytest.mark.parametrize("why", ["refused", "memory"])
def test_a_runtime_that_does_not_take_a_bundle_has_a_reason_and_no_line(
    why: str, made: list[str | None], bundle_of: BundleOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(bundle: object, runtime: str) -> object:
        raise BundleError("it has loops.", code="bundle.unusable-graph")

    if why == "refused":
        monkeypatch.setattr(bundle_benchmark, "with_runtime", refuse)
    else:
        few = "device_agent.training.trials.fastest_runtime.available_bytes"
        monkeypatch.setattr(few, lambda: 2 * 10**8)
        monkeypatch.setattr(bundle_benchmark, "ceilings", list)
    done = measured(bundle_of("full"))
    assert (done.exit_code, made) == (0, [None])
    _, own, *_, reason = done.stdout.splitlines()
    assert "onnxruntime" in own
    assert " without openvino" in reason
    assert ("it has loops." if why == "refused" else "half of the available memory") in reason


def test_the_file_is_a_device_profile(
    made: list[str | None], bundle_of: BundleOf, tmp_path: Path
) -> None:
    out = tmp_path / "board.json"
    done = measured(bundle_of("full"), "--out", out, "--name", "board", "--json")
    assert done.exit_code == 0
    found = load_device(str(out))
    assert json.loads(done.stdout) == json.loads(out.read_bytes())
    assert (found.name, found.calibration) == ("board", CALIBRATION)
    assert [one.machine.runtime for one in found.trainings] == [
        "onnxruntime 1.31.1",
        "openvino 2026.4.1",
    ]
    assert found.versions["onnxruntime"] == onnxruntime.__version__
    assert found.versions.keys() >= {"numpy", "edgetailor"}
    kept = measured("--out", out)
    assert (kept.exit_code, "exists already" in str(kept.exception)) == (1, True)
    alone = measured("--out", out, "--force")
    assert (alone.exit_code, load_device(str(out)).trainings) == (0, ())
    assert f"profile: {out}" in alone.stdout


def test_a_file_to_send_in_does_not_name_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "kitchen-board")
    found = bench_profile(None, CALIBRATION, None, [BenchRow("mine", full())])
    about = this_machine("")
    assert found.name in (about.model, about.processor, about.architecture)
    assert "kitchen-board" not in msgspec.json.encode(found).decode()


def test_nothing_to_measure_is_refused(made: list[str | None]) -> None:
    done = measured()
    assert (done.exit_code, made) == (2, [])
    assert "PLACES" in done.stderr
