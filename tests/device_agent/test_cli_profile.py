"""`edgetailor-agent profile`: its tables and refusals."""

import json
import re
import shutil
from pathlib import Path

from bundles import BATCH, FAMILIES, BundleOf, everything, rewrite
from commands import NUMBER, Agent, refusal


def test_profile(agent: Agent, bundle: Path) -> None:
    done = agent("profile", bundle, "--threads", "1")
    assert (done.code, done.stderr) == (0, "")
    time = rf"{NUMBER} ms \(p10 {NUMBER}, p90 {NUMBER}, n 20\)"
    spec = FAMILIES[bundle.name.removeprefix("tiny-")]
    assert re.fullmatch(
        rf"{spec}, batch {BATCH}, threads 1, onnxruntime \S+ on \S+\n"
        rf"forward        {time}\n"
        rf"training step  {time}\n"
        rf"backprop       {NUMBER} ms \(training step minus forward\)\n"
        rf"process peak   {NUMBER} MB \(resident set, Python and runtime too\)\n"
        rf"above idle     {NUMBER} MB \(peak minus the idle process\)\n",
        done.stdout,
    )


def test_profile_as_json(agent: Agent, bundle_of: BundleOf, tmp_path: Path) -> None:
    done = agent("profile", bundle_of("slice"), "--json")
    assert (done.code, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert set(found) == {
        "version", "submodel", "machine", "threads", "batch_size", "forward", "train",
        "peak_bytes", "peak_above_idle_bytes",
    }  # fmt: skip
    assert (found["version"], found["submodel"], found["threads"]) == (1, "slice:classifier", 0)
    assert found["batch_size"] == BATCH
    for name in ("forward", "train"):
        times = found[name]
        assert set(times) == {"median_s", "p10_s", "p90_s", "runs"}
        assert 0 < times["p10_s"] <= times["median_s"] <= times["p90_s"]
        assert times["runs"] == 20
    assert found["peak_bytes"] > found["peak_above_idle_bytes"] > 0
    assert set(found["machine"]) == {
        "system", "architecture", "processor", "cpu_count", "memory_bytes", "python", "runtime",
    }  # fmt: skip
    assert everything(tmp_path) == {}


def test_profile_refuses(agent: Agent, bundle_of: BundleOf, tmp_path: Path) -> None:
    assert "nowhere is no bundle" in refusal(agent("profile", "nowhere"))
    copy = shutil.copytree(bundle_of("full"), tmp_path / "bundle")
    (copy / "predict.onnx").write_bytes(b"no graph")
    rewrite(copy, lambda manifest: None)
    assert "predict.onnx is refused by onnxruntime" in refusal(agent("profile", copy))
