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

from bundles import BATCH, FAMILIES, BundleOf, everything
from commands import Agent, refusal
from device_agent.cli.bench_command import bench
from device_agent.profiling import bundle_benchmark, calibration
from device_agent.profiling.bundle_benchmark import BenchRow, bench_profile
from device_agent.profiling.profiler import profile_bundle
from made_calibration import CALIBRATION
from made_profiles import MACHINE, full
from profiles.documents.bundle_profile import Profile, this_machine
from profiles.documents.device_profile import load_device

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
    expected = [
        rf"{name} +{FAMILIES[family]} +{BATCH} +onnxruntime +{SECONDS} +\d+% +\d+\.\d"
        for name, family in (("full", "full"), ("slice", "slice"), (last, "low-rank"))
    ]
    for line, form in zip(lines[1 : 1 + len(expected)], expected, strict=True):
        assert re.fullmatch(form, line)
    *_, versions, machine = lines[1 + len(expected) :]
    assert re.fullmatch(rf"onnxruntime {onnxruntime.__version__}.*; threads 1", versions)
    assert re.fullmatch(r"on .+", machine)
    assert everything(tmp_path) == before


def test_a_place_without_bundles_is_refused(agent: Agent, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = agent("bench", "empty")
    assert refusal(done).startswith("empty is not a bundle and has no bundles in it. Give a folder")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every bundle takes 0.4 s, and this device is calibrated. The list has the bundles."""
    bundles: list[Path] = []

    def profile(folder: Path, threads: int, *, runs: int) -> Profile:
        bundles.append(folder)
        return full()

    monkeypatch.setattr(bundle_benchmark, "profile_bundle", profile)
    monkeypatch.setattr(calibration, "calibrate", lambda threads: CALIBRATION)
    return bundles


def measured(*arguments: object) -> Result:
    return CliRunner().invoke(bench, list(map(str, arguments)))


def test_a_damaged_bundle_does_not_end_the_others(
    asked: list[Path], bundle_of: BundleOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, made_up = tmp_path / "fleet", bundle_benchmark.profile_bundle

    def profile(folder: Path, threads: int, *, runs: int) -> Profile:
        measure = profile_bundle if folder.name == "broken" else made_up
        return measure(folder, threads, runs=runs)

    monkeypatch.setattr(bundle_benchmark, "profile_bundle", profile)
    for name in ("whole", "broken"):
        shutil.copytree(bundle_of("full"), fleet / name)
    (fleet / "broken" / "train.onnx").write_bytes(b"")
    done = measured(fleet, "--json")
    assert done.exit_code == 2
    broken, whole = json.loads(done.stdout)["bundles"]
    assert asked == [fleet / "whole"]
    assert (broken["name"], broken["seconds_per_batch"]) == ("broken", None)
    assert broken["code"].startswith("bundle.")
    assert "train.onnx" in broken["error"]
    assert (whole["name"], whole["submodel"], whole["error"]) == ("whole", "full", None)
    assert whole["runtime"].startswith("onnxruntime 1.")
    assert (whole["batch_size"], whole["seconds_per_batch"]) == (full().batch_size, 0.4)
    assert whole["peak_bytes"] > 10**6


def test_the_table_says_how_it_was_measured(asked: list[Path], bundle_of: BundleOf) -> None:
    done = measured(bundle_of("full"))
    assert (done.exit_code, asked) == (0, [bundle_of("full")])
    _, own, *legend = done.stdout.splitlines()
    assert own.split()[3:] == ["onnxruntime", "0.4000", "10%", "120.0"]
    assert legend == [
        "s/batch: median of 20 training steps; spread: p10 to p90, in % of the median",
        "peak MB: the whole process that trains, with Python and the runtime",
        "onnxruntime 1.31.1; threads 1",
        f"on {MACHINE.model}",
    ]


def test_the_file_is_a_device_profile(
    asked: list[Path], bundle_of: BundleOf, tmp_path: Path
) -> None:
    out = tmp_path / "board.json"
    done = measured(bundle_of("full"), "--out", out, "--name", "board", "--json")
    assert done.exit_code == 0
    device = load_device(str(out))
    assert json.loads(done.stdout) == json.loads(out.read_bytes())
    assert (device.name, device.calibration) == ("board", CALIBRATION)
    assert [profile.machine.runtime for profile in device.trainings] == ["onnxruntime 1.31.1"]
    assert device.versions["onnxruntime"] == onnxruntime.__version__
    assert device.versions.keys() >= {"numpy", "edgetailor"}
    kept = measured("--out", out)
    assert (kept.exit_code, "exists already" in str(kept.exception)) == (1, True)
    alone = measured("--out", out, "--force")
    assert (alone.exit_code, load_device(str(out)).trainings) == (0, ())
    assert f"profile: {out}" in alone.stdout


def test_a_file_to_send_in_does_not_name_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "kitchen-board")
    device = bench_profile(None, CALIBRATION, None, [BenchRow("mine", full())])
    about = this_machine("")
    assert device.name in (about.model, about.processor, about.architecture)
    assert "kitchen-board" not in msgspec.json.encode(device).decode()


def test_nothing_to_measure_is_refused(asked: list[Path]) -> None:
    done = measured()
    assert (done.exit_code, asked) == (2, [])
    assert "PLACES" in done.stderr
