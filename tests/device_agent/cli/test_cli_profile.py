"""`edgetailor-agent profile`: its tables, its document, and refusals."""

import json
import re
import shutil
import sys
from pathlib import Path

import msgspec
import pytest

from bundles import BATCH, FAMILIES, BundleOf, everything, rewrite
from commands import NUMBER, Agent, refusal
from device_agent.cli import main
from device_agent.profiling.profile_text import summary
from made_profiles import full, made_duration, sliced
from parameters import some_long
from profiles.documents.bundle_profile import Conditions, Energy, Point, Sustained, Validity
from profiles.documents.bundle_profile_reading import read_profile

PHASES = {
    "full": ["forward pass", "training step", "evaluation"],
    "low-rank": ["forward pass", "training step", "evaluation"],
    "slice": ["stage forward_0", "stage forward_1", "forward pass", "training step", "evaluation"],
    "cp": [
        "initialise", "forward pass", "step personal_step", "step factor_step", "training step",
        "evaluation",
    ],
}  # fmt: skip


@pytest.mark.parametrize("bundle", some_long(FAMILIES, "low-rank", "cp"), indirect=True)
def test_profile(agent: Agent, bundle: Path) -> None:
    done = agent("profile", bundle, "--threads", "1")
    assert (done.code, done.stderr) == (0, "")
    family = bundle.name.removeprefix("tiny-")
    width = max(map(len, PHASES[family]))
    rows = "".join(
        rf"{name:<{width}}( +{NUMBER}){{3}}  20 +{NUMBER} +{NUMBER} +{NUMBER} +({NUMBER}|-)\n"
        for name in PHASES[family]
    )
    assert re.fullmatch(
        rf"{FAMILIES[family]}, batch {BATCH}, threads 1, onnxruntime \S+ on \S+\n"
        rf" +ms +p10 +p90 +n +first +cold s +MB +predicted\n"
        rf"{rows}"
        r"ms: median time of one batch; first: first run; cold s: process start until the\n"
        r"session is open; MB: peak above the idle process; predicted: from the manifest.\n"
        rf"backprop      -?{NUMBER} [mu]s \(training step minus forward pass\)\n"
        rf"process peak  {NUMBER} MB, [a-z_0-9 ]+ \(with Python and runtime\)\n"
        rf"  idle        anonymous {NUMBER} MB, file pages {NUMBER} MB\n"
        rf"  at the end  anonymous {NUMBER} MB, file pages {NUMBER} MB\n"
        r"machine       .+\n"
        r"energy        (not measurable|\d+ J of the \w+)\n"
        r"(unstable      p10 to p90 wider than 26% of the median:\n"
        r"(              [a-z_0-9 ]+ \(\d+%\)\n)+)?",
        done.stdout,
    )
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_profile_as_json(agent: Agent, bundle_of: BundleOf, tmp_path: Path) -> None:
    done = agent("profile", bundle_of("slice"), "--json", "--out", "slice.json", "--runs", "5")
    assert (done.code, done.stderr) == (0, "")
    assert set(everything(tmp_path)) == {"slice.json"}
    assert (tmp_path / "slice.json").read_text() == done.stdout
    document = json.loads(done.stdout)
    assert set(document) == {
        "version", "submodel", "structure", "machine", "versions", "method", "measured_at",
        "batch_size", "phases", "before", "after", "validity", "sustained", "energy",
    }  # fmt: skip
    assert (document["version"], document["submodel"]) == (2, "slice:classifier")
    assert (document["batch_size"], document["sustained"]) == (BATCH, None)
    assert document["method"] == {
        "source": "profile", "clock": "clock_gettime(CLOCK_MONOTONIC)", "warm_up_runs": 3,
        "runs": 5, "threads": 0, "arena": "CPU arena on, memory pattern off, buffer reuse off",
    }  # fmt: skip
    for phase in document["phases"]:
        times = phase["steady"]
        assert set(times) == {"median_s", "p10_s", "p90_s", "runs"}
        assert 0 < times["p10_s"] <= times["median_s"] <= times["p90_s"]
        assert times["runs"] == 5
        assert 0 < phase["first_s"] < phase["cold_start_s"]
        idle, peak = phase["memory"]["idle"], phase["memory"]["peak_bytes"]
        assert peak > idle["anonymous_bytes"] + idle["file_bytes"] > 0
    assert set(document["machine"]) == {
        "kind", "system", "architecture", "processor", "cpu_count", "memory_bytes", "python",
        "runtime", "model",
    }  # fmt: skip


def test_a_sustained_run_is_said_and_reported(
    agent: Agent, bundle_of: BundleOf, tmp_path: Path
) -> None:
    bundle = bundle_of("full")
    done = agent("profile", bundle, "--sustained", "2s", "--out", "full.json", "--runs", "5")
    assert done.code == 0
    assert done.stderr.splitlines() == [
        "Measuring predict", "Measuring train", "Measuring evaluate",
        "Training for 2 s without a pause",
    ]  # fmt: skip
    assert re.search(
        rf"\nsustained     2 s: step {NUMBER} ms in the first 1 s,\n"
        rf"              {NUMBER} ms in the last \([+-]{NUMBER}%\)\n",
        done.stdout,
    )
    sustained = read_profile(tmp_path / "full.json").sustained
    assert sustained is not None
    assert [point.at_s for point in sustained.points] == [0.0, 1.0]
    assert sum(point.step.runs for point in sustained.points) > 20


def test_strict_prints_and_then_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    hot = msgspec.structs.replace(full(), validity=Validity(invalid=("throttled during train",)))
    monkeypatch.setattr(
        "device_agent.profiling.profiler.profile_bundle", lambda *given, **more: hot
    )
    for strict, code in (([], 0), (["--strict"], 7)):
        out = tmp_path / f"{code}.json"
        arguments = ["profile", "bundle", "--out", str(out), *strict]
        monkeypatch.setattr(sys, "argv", ["edgetailor-agent", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        assert ended.value.code == code
        assert printed.out.splitlines() == summary(hot)
        assert read_profile(out) == hot
    assert printed.err == (
        "Error: The device was slowed down while it was measured: throttled during train. Let it "
        "cool, check its power supply, and measure again.\n"
    )


def test_profile_refuses(agent: Agent, bundle_of: BundleOf, tmp_path: Path) -> None:
    assert "nowhere is not a bundle" in refusal(agent("profile", "nowhere"))
    copy = shutil.copytree(bundle_of("full"), tmp_path / "bundle")
    (copy / "predict.onnx").write_bytes(b"no graph")
    rewrite(copy, lambda manifest: None)
    assert "predict.onnx was not opened: the graph has bytes" in refusal(agent("profile", copy))
    assert "Invalid time span '10min'" in refusal(agent("profile", copy, "--sustained", "10min"))
    (tmp_path / "kept.json").write_text("mine")
    said = refusal(agent("profile", copy, "--out", "kept.json"))
    assert said == "kept.json exists already: give another place, or --force to replace it."
    assert (tmp_path / "kept.json").read_text() == "mine"


# The text, of figures that are known

TEXT = """\
slice:blocks.3, batch 32, threads 1, onnxruntime 1.31.1 on aarch64
                     ms     p10     p90   n   first  cold s    MB  predicted
stage forward_0   50.00   47.50   52.50  20  100.00    0.50  21.0       21.0
forward pass      60.00   57.00   63.00  20  120.00    0.50  20.0       20.0
training step    160.00  152.00  168.00  20  320.00    0.50  40.0       40.0
ms: median time of one batch; first: first run; cold s: process start until the
session is open; MB: peak above the idle process; predicted: from the manifest.
backprop      100.00 ms (training step minus forward pass)
process peak  100.0 MB, training step (with Python and runtime)
  idle        anonymous 28.0 MB, file pages 32.0 MB
  at the end  anonymous 68.0 MB, file pages 32.0 MB
machine       48.3 C to 61.2 C, ondemand, 1.50 GHz to 0.60 GHz, battery 80%
energy        121 J of the battery
sustained     600 s: step 160.00 ms in the first 60 s,
              208.00 ms in the last (+30.0%)
INVALID       throttled during train
unstable      p10 to p90 wider than 26% of the median:
              forward pass (10%)
"""


def test_the_text() -> None:
    heat = Sustained(
        duration_s=600,
        window_s=60,
        first=made_duration(0.16),
        last=made_duration(0.208),
        points=(Point(at_s=0, step=made_duration(0.16), temperature_c=48.3, clock_hz=None),),
    )
    profile = msgspec.structs.replace(
        sliced(),
        before=Conditions(
            temperature_c=48.3, governor="ondemand", clock_hz=1_500_000_000, throttled=(),
            battery=0.8,
        ),
        after=Conditions(
            temperature_c=61.2, governor="ondemand", clock_hz=600_000_000, throttled=("throttled",),
            battery=0.8,
        ),
        validity=Validity(invalid=("throttled during train",), unstable=("predict",)),
        sustained=heat,
        energy=Energy(joules=120.6, source="battery"),
    )  # fmt: skip
    assert summary(profile) == TEXT.splitlines()


def test_what_a_silent_machine_does_not_tell() -> None:
    phases = tuple(
        msgspec.structs.replace(phase, memory=None, predicted_bytes=None, cold_start_s=None)
        for phase in full().phases
    )
    silent = msgspec.structs.replace(full(), phases=phases, before=Conditions(), after=Conditions())
    lines = summary(silent)
    assert lines[2] == "forward pass   100.00   95.00  105.00  20  200.00       -   -          -"
    assert lines[-3:] == [
        "process peak  not measurable",
        "machine       temperature, clock and throttling not measurable",
        "energy        not measurable",
    ]
